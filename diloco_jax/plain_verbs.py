"""Verbs that take no configuration file."""

from collections.abc import Callable, Container, Sequence
import os
import pathlib

from diloco_jax import command_line
from diloco_jax import config as config_lib
from diloco_jax import config_check
from diloco_jax.errors import Problem
from diloco_jax.errors import UserError


def parse_flags(
  words: Sequence[str], known: Container[str], required: Sequence[str]
) -> tuple[dict[str, str], list[tuple[str, str]]]:
  """Flags of a verb that takes no configuration file.

  Returns:
    The flags by name, and the settings given as --config.KEY=VALUE.

  Raises:
    UserError: a line for every unknown, empty or missing flag.
  """
  found: dict[str, str] = {}
  given: list[tuple[str, str]] = []
  problems = []
  keys = config_lib.leaf_types(config_lib.default_config())
  for word in command_line.split_words(words, ()):
    path = word.name.removeprefix('config.')
    if word.value is None or not word.value:
      problems.append(Problem(word.text, 'no value', '--NAME=VALUE', ''))
    elif path != word.name and path in keys:
      given.append((path, word.value))
    elif path != word.name:
      problems.append(config_check.unknown_key(f'--{word.name}', path, keys))
    elif word.name in known:
      found[word.name] = word.value
    else:
      problems.append(
        Problem(f'--{word.name}', 'an unknown flag', '', 'see --help')
      )
  for name in required:
    if name not in found:
      problems.append(Problem(f'--{name}', 'nothing', 'a value', 'see --help'))
  if problems:
    raise UserError(problems)
  return found, given


def island(words: Sequence[str]) -> int:
  """Join a run. Raises UserError with a line for every mistake."""
  flags, given = parse_flags(
    words,
    ('syncer', 'token_file', 'index', 'workdir'),
    ('syncer', 'token_file'),
  )
  problems = []
  address = flags['syncer']
  host, _, port = address.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 65536:
    problems.append(
      Problem('--syncer', address, 'HOST:PORT', 'as the syncer printed it')
    )
  index = flags.get('index', '-1')
  if not index.removeprefix('-').isdecimal():
    problems.append(Problem('--index', index, 'a whole number', ''))
  if problems:
    raise UserError(problems)
  from diloco_jax import launch

  return launch.join(
    address,
    pathlib.Path(flags['token_file']),
    index=int(index),
    workdir=pathlib.Path(flags['workdir']) if 'workdir' in flags else None,
    given=given,
  )


def report(words: Sequence[str]) -> int:
  """Write summary.json and report.html of a run folder again."""
  flags, given = parse_flags(words, ('workdir',), ('workdir',))
  if given:
    raise UserError(
      [Problem('--config.*', 'a setting', 'none', 'report takes --workdir')]
    )
  from diloco_jax import launch

  return launch.report(pathlib.Path(flags['workdir']))


def simulate(words: Sequence[str]) -> int:
  """The protocol under faults, in virtual time."""
  from diloco_jax.simulation import command
  from diloco_jax.simulation import scenario_json

  flags, given = parse_flags(words, ('seeds', 'mode', 'jobs', 'scenario'), ())
  problems = []
  if given:
    problems.append(
      Problem('--config.*', 'a setting', 'none', 'a seed draws everything')
    )
  if ('seeds' in flags) == ('scenario' in flags):
    got = 'both' if 'seeds' in flags else 'neither'
    problems.append(Problem('--seeds, --scenario', got, 'one of them', ''))
  mode = flags.get('mode', command.TIMING)
  if mode not in command.MODES:
    problems.append(Problem('--mode', mode, ' or '.join(command.MODES), ''))
  jobs = flags.get('jobs', str(os.cpu_count() or 1))
  if not jobs.isdecimal() or not int(jobs):
    problems.append(Problem('--jobs', jobs, 'a number of processes', ''))
  seeds = range(0)
  if 'seeds' in flags:
    begin, _, end = flags['seeds'].partition(':')
    if begin.isdecimal() and end.isdecimal() and int(begin) < int(end):
      seeds = range(int(begin), int(end))
    else:
      expected = 'A:B with A < B, for seeds A to B-1'
      problems.append(Problem('--seeds', flags['seeds'], expected, ''))
  scenario = None
  if 'scenario' in flags:
    try:
      text = pathlib.Path(flags['scenario']).read_text(encoding='utf-8')
      scenario = scenario_json.from_json(text)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as e:
      where = f'--scenario={flags["scenario"]}'
      expected = 'a line that simulate has printed'
      problems.append(Problem(where, str(e), expected, ''))
  if problems:
    raise UserError(problems)
  if scenario is not None:
    return command.rerun(scenario)
  return command.simulate(seeds, mode, int(jobs))


def replay(words: Sequence[str]) -> int:
  """Every tape of a run through its machine, and against the others."""
  from diloco_jax.simulation import replaying

  flags, given = parse_flags(words, ('workdir',), ('workdir',))
  if given:
    raise UserError(
      [Problem('--config.*', 'a setting', 'none', 'replay takes --workdir')]
    )
  workdir = pathlib.Path(flags['workdir'])
  return replaying.main(workdir, _reproduce(workdir))


def _reproduce(workdir: pathlib.Path) -> Callable[[], int] | None:
  """Where a run has kept its arrays: does its merges again."""
  if not (workdir / 'tape' / 'payloads').is_dir():
    return None
  from diloco_jax.launch import reproducing

  return lambda: reproducing.reproduce(workdir)


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
  'island': island,
  'report': report,
  'replay': replay,
  'simulate': simulate,
}
