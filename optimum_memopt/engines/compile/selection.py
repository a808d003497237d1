"""What the user asked for against what the graphs offer. Pure."""

from collections import Counter
from collections.abc import Iterable

from optimum_memopt.plans.grammar import ALL, PlanConfig
from optimum_memopt.plans.matching import Matches, match

from .naming import translate
from .offers import Offer


def matches(config: PlanConfig, offers: Iterable[Offer], strict: bool) -> Matches:
    """Each request with the row that it means, over all graphs of a forward.

    A count of more occurrences than there are means all, with a remark.

    Raises:
        ConfigError: `strict`, and an id (or its strategy) that no graph has; near matches come first in the message.
    """
    frequencies = Counter()
    for offer in offers:
        frequencies[offer.config] += len(offer.occurrences)
    found = match(config, frequencies, strict, here="engine", translate=translate)
    too_many = (
        f"{one.request}: there are {frequencies[one.plan]} only, all of them are on"
        for one in found.on
        if one.request.count != ALL and one.request.count > frequencies[one.plan]
    )
    return Matches(found.on, (*found.remarks, *too_many))
