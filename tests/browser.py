"""A headless Chromium for the page tests; `python tests/browser.py` installs one from npm if none is found."""

import base64
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

# 70 MB for Linux on x86, including the libraries and fonts that a container lacks.
PACKAGE = "@sparticuz/chromium@147.0.0"
FOLDER = Path(sys.prefix) / "browser"
# The package's own configuration looks for fonts in AWS folders and in /tmp.
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{folder}/cache</cachedir></fontconfig>
"""
UNPACK = 'import chromium from "@sparticuz/chromium"; await chromium.executablePath()'


def find() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", str(FOLDER / "chromium"))
    return next(filter(None, map(shutil.which, names)), None)


def install() -> str:
    """Install Chromium if none is found; returns the reason if that is impossible."""
    if find():
        return ""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64") or not shutil.which("npm"):
        return "no Chromium and no npm to get one with: tests of the report's page are skipped"
    FOLDER.mkdir(exist_ok=True)
    # The package unpacks into the temporary folder, and unpacks its libraries only if these variables name AWS.
    variables = {**os.environ, "TMPDIR": str(FOLDER), "AWS_EXECUTION_ENV": "AWS_Lambda_nodejs22.x"}
    commands = (
        ["npm", "install", "--prefix", str(FOLDER), "--no-save", "--silent", PACKAGE],
        ["node", "--input-type=module", "-e", UNPACK],
    )
    for command in commands:
        done = subprocess.run(command, cwd=FOLDER, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"no Chromium ({command[0]}: {done.stderr.strip()[-200:]}): tests of the report's page are skipped"
    (FOLDER / "fonts" / "fonts.conf").write_text(FONTS.format(folder=FOLDER / "fonts"))
    return ""


def environment(program: str) -> dict[str, str]:
    """Returns the environment of the browser process; an installed one needs its own libraries and fonts."""
    if Path(program).parent != FOLDER:
        return dict(os.environ)
    return {**os.environ, "LD_LIBRARY_PATH": f"{FOLDER}/al2023/lib", "FONTCONFIG_PATH": f"{FOLDER}/fonts"}


class Browser:
    """A page driven through the DevTools pipe, as small builds have no --dump-dom or --screenshot."""

    def __init__(self, profile: Path) -> None:
        theirs, self._ours = zip(*((r, w) for r, w in (os.pipe(), reversed(os.pipe()))), strict=True)
        # The protocol reads from 3 and writes to 4; both numbers may already be in use here.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in theirs]
        program = str(find())
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"],
            env=environment(program),
            pass_fds=(3, 4),
            preexec_fn=lambda: [os.dup2(end, number) for number, end in enumerate(ends, 3)] and None,
            stderr=subprocess.DEVNULL,
        )
        for end in (*theirs, *ends):
            os.close(end)
        self._out, self._in = os.fdopen(self._ours[0], "wb", 0), os.fdopen(self._ours[1], "rb")
        self._calls, self._session = 0, {}
        target = self._call("Target.createTarget", url="about:blank")
        self._session = {"sessionId": self._call("Target.attachToTarget", flatten=True, **target)["sessionId"]}
        self._call("Page.enable")

    def open(self, path: Path, width: int) -> None:
        size = {"width": width, "height": 3000, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._call("Page.navigate", url=path.as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression in the page."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def screenshot(self) -> bytes:
        return base64.b64decode(self._call("Page.captureScreenshot")["data"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters, **self._session}
        self._out.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._calls:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (character := self._in.read(1)) != b"\0":
            assert character, "the browser has ended"
            text += character
        return json.loads(text)


if __name__ == "__main__":
    print(install() or f"==> pages are tested with {find()}")
