"""What the user asked for against what the graphs candidate. Pure."""

from collections import Counter
from collections.abc import Iterable

from optimum_memopt.engines.compile.analysis.candidates import Candidate
from optimum_memopt.engines.compile.analysis.naming import translate
from optimum_memopt.plans.grammar import ALL, PlanConfig
from optimum_memopt.plans.matching import Matches, match


def matches(config: PlanConfig, candidates: Iterable[Candidate], strict: bool) -> Matches:
    """Each request with the row that it means, over all graphs of a forward.

    A count of more occurrences than there are means all, with a remark.

    Raises:
        ConfigError: `strict`, and an id (or its strategy) that no graph has; near matches come first in the message.
    """
    frequencies = Counter()
    for candidate in candidates:
        frequencies[candidate.config] += len(candidate.occurrences)
    found = match(config, frequencies, strict, here="engine", translate=translate)
    too_many = (
        f"{one.request}: there are {frequencies[one.plan]} only, all of them are on"
        for one in found.on
        if one.request.count != ALL and one.request.count > frequencies[one.plan]
    )
    return Matches(found.on, (*found.remarks, *too_many))
