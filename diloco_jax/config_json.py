"""The configuration of a run as JSON, and strictly back."""

from collections.abc import Iterable, Mapping
import json
import math
import pathlib
import typing
from typing import Any

from diloco_jax import errors
from diloco_jax import run_config
from diloco_jax.run_config import RunConfig

FILE_NAME = 'config.json'


def to_json(run: RunConfig) -> str:
  """One line of JSON, the same for equal configurations."""
  return json.dumps(run_config.to_tree(run), sort_keys=True, allow_nan=False)


def _scalar(hint: Any, value: Any) -> Any:
  """The value as its annotation wants it; raises TypeError."""
  allowed = typing.get_args(hint) or (hint,)
  if value is None and type(None) in allowed:
    return None
  if float in allowed and type(value) is int:
    value = float(value)
  if type(value) not in allowed:
    names = ' or '.join(t.__name__ for t in allowed if t is not type(None))
    raise TypeError(names)
  if isinstance(value, float) and not math.isfinite(value):
    raise TypeError('a finite number')
  return value


def _leaf_hints(cls: type) -> dict[str, Any]:
  # The sections of these two are annotated by name, see section_classes.
  if cls in (RunConfig, run_config.LaunchOptions):
    return dict(cls.__annotations__)
  return typing.get_type_hints(cls)


class _Builder:
  """Makes the frozen tree, and collects what does not fit on the way."""

  def __init__(self, given: tuple[str, ...]) -> None:
    self.classes = run_config.section_classes()
    self.given = given
    self.problems: list[errors.Problem] = []

  def problem(self, path: str, got: Any, expected: str, fix: str = '') -> None:
    self.problems.append(errors.Problem(path, got, expected, fix))

  def section(self, path: str, values: Any) -> Any:
    """The dataclass of a section; None where something did not fit."""
    before = len(self.problems)
    cls = self.classes[path]
    hints = _leaf_hints(cls)
    hints.pop('given', None)
    if not isinstance(values, Mapping):
      self.problem(path, repr(values), 'a section of settings')
      return None
    for name in sorted(values.keys() ^ hints.keys()):
      state = 'an unknown key' if name in values else 'nothing'
      self.problem(
        run_config.join(path, name), state, 'every known key and no other'
      )
    fields = {}
    for name in sorted(values.keys() & hints.keys()):
      inner = run_config.join(path, name)
      if inner in self.classes:
        fields[name] = self.section(inner, values[name])
        continue
      try:
        fields[name] = _scalar(hints[name], values[name])
      except TypeError as e:
        self.problem(inner, repr(values[name]), str(e))
    if len(self.problems) > before:
      return None
    if not path:
      fields['given'] = self.given
    try:
      return cls(**fields)
    except errors.UserError as e:
      self.problems.extend(e.problems)
    except ValueError as e:
      self.problem(path, '', str(e))
    return None


def build(tree: Mapping[str, Any], given: tuple[str, ...] = ()) -> RunConfig:
  """The frozen tree of nested dicts.

  Raises:
    UserError: keys missing or unknown, types that do not fit, and what the
      options' own checks say.
  """
  builder = _Builder(given)
  run = builder.section('', tree)
  if builder.problems:
    raise errors.UserError(builder.problems)
  assert isinstance(run, RunConfig)
  return run


def from_json(text: str) -> RunConfig:
  """The exact inverse of `to_json`; raises UserError for anything else."""
  try:
    tree = json.loads(text)
    if not isinstance(tree, dict):
      raise ValueError('not an object')
    given = tree.pop('given')
    if not isinstance(given, list) or not set(given) <= set(
      run_config.GIVEN_PATHS
    ):
      raise ValueError('given: not a list of settings')
  except (ValueError, KeyError, TypeError, RecursionError) as e:
    raise errors.UserError(
      [errors.Problem('configuration', str(e), 'JSON as written by a run', '')]
    ) from e
  return build(tree, tuple(given))


def check_given(
  run: RunConfig, given: Iterable[tuple[str, str]]
) -> tuple[errors.Problem, ...]:
  """What an island set on its own and the run has otherwise.

  Args:
    run: the configuration of the run, from the syncer.
    given: (dotted path, JSON value) pairs. `island` fields are the island's
      own business and pass.
  """
  flat = run_config.to_flat(run)
  problems = []
  for path, text in given:
    if path not in flat:
      problems.append(
        errors.Problem(f'--config.{path}', text, 'a key of this run', 'drop it')
      )
      continue
    if not run_config.is_run_field(path):
      continue
    try:
      same = json.loads(text) == flat[path]
    except ValueError:
      same = False
    if not same:
      wanted = json.dumps(flat[path])
      problems.append(
        errors.Problem(
          f'--config.{path}',
          text,
          f'{wanted}, as the run has it',
          "drop the flag: an island gets the run's settings on joining",
        )
      )
  return tuple(problems)


def save(run: RunConfig, folder: pathlib.Path) -> None:
  """Writes config.json, the resolved configuration and its hash, at once."""
  text = json.dumps(
    {
      'config_hash': run_config.config_hash(run),
      'config': run_config.to_tree(run),
    },
    indent=2,
    sort_keys=True,
    allow_nan=False,
  )
  path = folder / FILE_NAME
  partial = path.with_name(f'{FILE_NAME}.partial')
  partial.write_text(f'{text}\n', encoding='utf-8')
  partial.replace(path)


def load(folder: pathlib.Path) -> RunConfig:
  """The configuration that `save` wrote; raises UserError, OSError."""
  path = folder / FILE_NAME
  try:
    config = json.loads(path.read_text(encoding='utf-8'))['config']
  except (ValueError, KeyError, TypeError) as e:
    raise errors.UserError(
      [errors.Problem(str(path), '', 'JSON as written by a run', '')]
    ) from e
  return from_json(json.dumps(config))
