"""All safety checkers, as one observer of a world.

Each says in its docstring what it holds. They keep books of their own
(`books`, `round_book`) from what they see the machines do.
"""

from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation import bounds_check
from diloco_jax.simulation import round_checks
from diloco_jax.simulation import version_checks
from diloco_jax.simulation import work_checks
from diloco_jax.simulation.books import Books
from diloco_jax.simulation.checking import Checker
from diloco_jax.simulation.checking import Watch
from diloco_jax.simulation.coverage import Coverage
from diloco_jax.simulation.coverage import Tally
from diloco_jax.simulation.round_book import RoundBook
from diloco_jax.simulation.work_checks import WorkChecker

# These look at an action before the books know of it.
EARLY: tuple[type[WorkChecker], ...] = (
  *round_checks.EARLY, *version_checks.EARLY, bounds_check.Bounds,
)  # fmt: skip
CHECKERS: tuple[type[WorkChecker], ...] = (
  *work_checks.CHECKERS, *round_checks.CHECKERS, *version_checks.CHECKERS,
)  # fmt: skip


class Checkers(Watch):
  """The observer. Raises CheckFailure at the first thing that is wrong."""

  def __init__(
    self, settings: Settings, *more: Checker, tally: Tally | None = None
  ):
    self.books = Books(settings)
    self.rounds = RoundBook(settings)
    made = {
      cls: cls(settings, self.books, self.rounds) for cls in EARLY + CHECKERS
    }
    self.coverage = Coverage(self.rounds, tally)
    super().__init__(
      [
        *(made[x] for x in EARLY),
        self.books,
        self.rounds,
        *(made[x] for x in CHECKERS),
        *more,
        self.coverage,
      ]
    )


def table() -> dict[str, str]:
  """What each checker holds."""
  return {
    x.__name__: (x.__doc__ or '').splitlines()[0] for x in EARLY + CHECKERS
  }
