"""Who runs where: processes, threads; and the way in for other loops."""

from collections.abc import Sequence
import pathlib
from typing import Any

from diloco_jax.run_config import RunConfig


def train(run: RunConfig, workdir: pathlib.Path) -> int:
  """`train` from the command line; returns the exit code."""
  from diloco_jax.launch import training_run

  return training_run.train(run, workdir.absolute())


def serve(run: RunConfig, workdir: pathlib.Path) -> int:
  """`syncer` from the command line; returns the exit code."""
  from diloco_jax.launch import joining

  return joining.serve(run, workdir.absolute())


def join(
  address: str,
  token_file: pathlib.Path,
  *,
  index: int,
  workdir: pathlib.Path | None,
  given: Sequence[tuple[str, str]],
) -> int:
  """`island` from the command line; returns the exit code."""
  from diloco_jax.launch import joining

  return joining.join(
    address, token_file, index=index, workdir=workdir, given=given
  )


def report(workdir: pathlib.Path) -> int:
  """`report` from the command line; returns the exit code."""
  from diloco_jax.launch import training_run

  return training_run.close_books(workdir.absolute())


def run(
  task: Any,
  config: Any,
  runtime: str = 'threads',
  workdir: pathlib.Path | None = None,
) -> Any:
  """A whole run in this process; see `launch.results.RunResult`.

  Args:
    task: what is trained, see `tasks.base.Task`.
    config: a ConfigDict as in experiments/configs/, or a resolved one.
    runtime: `threads`, in real time; `virtual`, in simulated time and the same
      to the bit each time.
    workdir: of the run folder; None: a temporary one that is removed.

  Raises:
    ValueError: another runtime.
    UserError: a mistake in the configuration.
  """
  from diloco_jax import config as config_lib
  from diloco_jax.launch import threads
  from diloco_jax.launch import virtual

  runtimes = {
    'threads': threads.run_in_threads,
    'virtual': virtual.run_in_virtual_time,
  }
  if runtime not in runtimes:
    expected = ' or '.join(runtimes)
    raise ValueError(f'runtime {runtime!r}, expected {expected}')
  resolved = (
    config if isinstance(config, RunConfig) else config_lib.resolve(config)
  )
  return runtimes[runtime](task, resolved, workdir)
