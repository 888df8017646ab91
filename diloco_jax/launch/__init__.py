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
  """A whole run in this process; see `launch.threads.RunResult`."""
  from diloco_jax import config as config_lib
  from diloco_jax.launch import threads

  if runtime != 'threads':
    raise ValueError(f'runtime {runtime!r}, expected threads')
  resolved = (
    config if isinstance(config, RunConfig) else config_lib.resolve(config)
  )
  return threads.run_in_threads(task, resolved, workdir)
