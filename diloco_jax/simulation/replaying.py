"""What `python -m diloco_jax replay` does."""

from collections.abc import Callable
import pathlib
import time

from diloco_jax.errors import Problem
from diloco_jax.errors import UserError
from diloco_jax.simulation import replay
from diloco_jax.telemetry import processes

DIFFERENT = 1


def killed(workdir: pathlib.Path) -> set[str]:
  """Tapes whose writers ended before their machines did."""
  path = workdir / 'processes.json'
  if not path.exists():
    return set()
  names = set()
  for row in processes.read_processes(path):
    if processes.is_bad_exit(row.get('exit')) or row.get('exit') is None:
      role = row.get('role')
      names.add(role if role == 'syncer' else f'{role}_{row.get("index")}')
  return names


def main(
  workdir: pathlib.Path, reproduce: Callable[[], int] | None = None
) -> int:
  """Prints a line for each tape; returns the exit code.

  Args:
    workdir: of the run.
    reproduce: does the run's merges again, and returns their number.

  Raises:
    UserError: there is nothing to replay.
  """
  if not list(replay.tapes(workdir)):
    raise UserError(
      [
        Problem(
          f'--workdir={workdir}', 'no tapes', 'the folder of a run',
          'tapes are DIR/tape/*.jsonl',
        )
      ]
    )  # fmt: skip
  began = time.monotonic()
  try:
    told = replay.replay(workdir, killed(workdir))
    merges = reproduce() if reproduce is not None else None
  except (replay.DifferenceError, ValueError, OSError) as e:
    print(f'DIFFERENT {e}')  # noqa: T201
    return DIFFERENT
  for one in told:
    end = '' if one.ended else ', ends where its process was killed'
    print(  # noqa: T201
      f'{one.path.name}: {one.events} events and {one.decisions} decisions, '
      f'the same{end}'
    )
  heard = sum(len(x.heard) for x in told)
  got = sum(len(x.got) for x in told)
  print(  # noqa: T201
    f'{got} contributions are those sent, {heard} broadcasts those merged, '
    f'{time.monotonic() - began:.1f} s'
  )
  if merges is not None:
    print(f'{merges} merges done again, the same bits each')  # noqa: T201
  return 0
