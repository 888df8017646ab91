"""Entry point: `python -m diloco_jax VERB`. Kept short; it reads the flags."""

from collections.abc import Sequence
import pathlib
import sys

from absl import flags
from ml_collections import config_flags

from diloco_jax import command_line
from diloco_jax import errors
from diloco_jax import plain_verbs

FLAGS = flags.FLAGS
_CONFIG = config_flags.DEFINE_config_file('config', lock_config=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_ASYNC_MODE = flags.DEFINE_bool(
  'async_mode', None, 'False: the synchronous preset diloco.'
)
INTERRUPTED = 130  # as a shell reports Ctrl-C


def _new_run(verb: str) -> int:
  config = _CONFIG.value
  overrides = tuple(FLAGS['config'].override_values) if config else ()
  run = command_line.new_run(
    config, overrides, _ASYNC_MODE.value, _WORKDIR.value
  )
  # Imports jax, which takes seconds: after all that can be checked without.
  from diloco_jax import launch

  start = launch.train if verb == command_line.TRAIN else launch.serve
  return start(run, pathlib.Path(_WORKDIR.value))


def main(argv: Sequence[str]) -> int:
  """Carries out a command line; returns the exit code."""
  try:
    _, verb, *words = command_line.parse(argv, FLAGS)
    if verb in command_line.PLAIN_VERBS:
      return plain_verbs.VERBS[verb](words)
    return _new_run(verb)
  except errors.UserError as e:
    print(e, file=sys.stderr)  # noqa: T201
    return errors.UserError.EXIT_CODE
  except KeyboardInterrupt:
    return INTERRUPTED
