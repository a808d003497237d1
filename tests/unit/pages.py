"""Parses a page as a browser does and checks that it is self-contained."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "img", "link", "input", "hr"}
LOADING = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "background"}
MOST = 400_000


@dataclass
class Element:
    """An element with all text inside it."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    children: list["Element"] = field(default_factory=list)

    def all(self, tag: str) -> list["Element"]:
        found = [self] if self.tag == tag else []
        return [*found, *(one for child in self.children for one in child.all(tag))]


class Parsed(HTMLParser):
    """A parsed page; raises if an element is not closed or is closed elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [self.root], f"not closed: {self._open[-1].tag}"

    def handle_starttag(self, tag, attributes):
        element = Element(tag, dict(attributes))
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)
        if "id" in element.attributes:
            self.ids.append(element.attributes["id"])

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self._open[-1].tag == tag, f"</{tag}> within <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data):
        for element in self._open:
            element.text += data

    def by_id(self, name: str) -> Element:
        def find(element):
            yield from [element] if element.attributes.get("id") == name else []
            for child in element.children:
                yield from find(child)

        return next(find(self.root))


def check_alone(text: str) -> Parsed:
    """Check that a page loads nothing, runs nothing and is small; returns it parsed."""
    page = Parsed(text)
    assert len(text.encode()) < MOST
    assert not page.root.all("script") and not page.root.all("link") and not page.root.all("img")
    for element in [one for tag in {"a", "use", "image", "iframe", "object"} for one in page.root.all(tag)]:
        for name in LOADING & element.attributes.keys():
            assert element.attributes[name].startswith("#"), element
    style = "".join(element.text for element in page.root.all("style"))
    assert "@import" not in text and not re.search(r"url\((?!#)", text) and "@font-face" not in style
    assert "@media print" in style and "prefers-color-scheme: dark" in style
    assert len(page.ids) == len(set(page.ids)), "an id is there twice"
    used = re.findall(r'(?:url\(|href=")#([^")]+)', text)
    assert set(used) <= set(page.ids)
    return page


def cells(page: Parsed, table: str) -> list[list[Element]]:
    (body,) = page.by_id(table).all("tbody")
    return [row.all("td") for row in body.all("tr")]
