"""Mistakes that a user can make, each told in one line."""

from collections.abc import Sequence
from typing import NamedTuple


class Problem(NamedTuple):
  """One mistake: where it is, what was found, what fits, what to do."""

  where: str  # a flag, a dotted config path or a file
  got: str
  expected: str
  fix: str

  def __str__(self) -> str:
    parts = [f'{self.where}: got {self.got}' if self.got else self.where]
    if self.expected:
      parts.append(f'expected {self.expected}')
    if self.fix:
      parts.append(self.fix)
    # A value may hold line breaks; a problem stays one line.
    return ' '.join('; '.join(parts).split())


class UserError(Exception):
  """The user's mistake: every problem at once; the process exits with 2."""

  EXIT_CODE = 2

  def __init__(self, problems: Sequence[Problem]) -> None:
    assert problems and all(isinstance(p, Problem) for p in problems)
    self.problems: tuple[Problem, ...] = tuple(problems)
    super().__init__(self.problems)

  def __str__(self) -> str:
    return '\n'.join(str(problem) for problem in self.problems)
