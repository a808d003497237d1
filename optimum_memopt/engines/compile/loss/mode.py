"""How the loss is to be computed, by all that says so: a flag, a config's row, a plan file."""

import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.options import AUTO, CHUNKED, PLAIN
from optimum_memopt.plans.grammar import ALL, ConfigError, PlanConfig, Strategy

CLUSTER_ID = "Loss+"
ROW = f"{CLUSTER_ID}:{int(Strategy.RECOMPUTE)}:{ALL}"


def mode_of(selection: Selection, flag: str) -> tuple[PlanConfig | None, str]:
    """The selection's config without the loss's row, and the mode that is asked for.

    Args:
        selection: which plans.
        flag: `--memory_opt_loss`, one of `LOSSES`.

    Raises:
        ConfigError: the flag says one thing, and the row or the plan file another.
    """
    config, plan = selection.config, selection.plan
    if plan is not None:
        if selection.strict and flag not in (AUTO, plan.loss):
            raise ConfigError(
                f"--memory_opt_loss {flag} with --memory_opt_plan: the file was made with the loss {plan.loss}, which "
                "has another graph; leave --memory_opt_loss out"
            )
        return config, plan.loss if flag == AUTO else flag
    requests = config.requests if config is not None else ()
    of_loss = [request for request in requests if request.cluster_id == CLUSTER_ID]
    if not of_loss:
        return config, flag
    asked = CHUNKED if of_loss[0].is_on else PLAIN
    if flag not in (AUTO, asked):
        raise ConfigError(f"--memory_opt_loss {flag} together with {of_loss[0]} in the config: leave one of them out")
    others = tuple(request for request in requests if request not in of_loss)
    return (PlanConfig(others) if others else None), asked


def may_have_vocabulary(model: torch.nn.Module) -> bool:
    """True where there may be logits of a vocabulary; classifiers of transformers have no output embeddings."""
    output_embeddings = getattr(model, "get_output_embeddings", None)
    return output_embeddings is None or output_embeddings() is not None
