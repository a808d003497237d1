"""The page about a Trainer's run."""

import os
import weakref

from transformers import Trainer

from optimum_memopt.callbacks.collected import CollectingCallback
from optimum_memopt.callbacks.plan_stats import PlanStatsCallback
from optimum_memopt.engines.base import Engine
from optimum_memopt.errors import MemOptError, line_of
from optimum_memopt.logs import get_logger
from optimum_memopt.option_values import check_drawing
from optimum_memopt.report.data import of_training
from optimum_memopt.report.page import Page, render


class TrainingReport:
    """Makes the page about one Trainer's runs.

    Args:
        trainer: whose runs.
        engine: that trains its model.
        plan_stats: of the run.
        collected: of the run.
    """

    def __init__(
        self, trainer: Trainer, engine: Engine, plan_stats: PlanStatsCallback, collected: CollectingCallback
    ) -> None:
        # The Trainer owns this.
        self._trainer = weakref.ref(trainer)
        self._engine, self._plan_stats, self._collected = engine, plan_stats, collected

    def page(self, path: os.PathLike | str | None = None, failure: str = "") -> Page:
        """The page about the last run, or the one that is under way.

        Args:
            path: HTML file to write, too.
            failure: see `failure_text`.

        Raises:
            MemOptError: matplotlib or jinja2 is missing, or the file cannot be written.
        """
        check_drawing("report")
        trainer = self._trainer()
        if trainer is None:
            raise MemOptError("report: the Trainer is gone")
        page = render(of_training(trainer, self._engine, self._plan_stats, self._collected, failure))
        if path is not None:
            page.save(path)
        return page

    def write(self, path: os.PathLike | str, failure: str) -> None:
        """`page` at the end of a run, on the world's rank 0; what goes wrong is a warning, since the run is over.

        Args:
            path: HTML file.
            failure: see `failure_text`; empty: the run ended by itself.
        """
        trainer = self._trainer()
        if trainer is None or not trainer.is_world_process_zero():
            return
        try:
            self.page(path, failure)
        except Exception as error:
            get_logger().warning(f"the report was not written ({line_of(error)})")
        else:
            get_logger().info(f"wrote the report about this run to {path}")
