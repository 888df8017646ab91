"""Mistakes in a configuration, found without importing jax, all at once."""

from collections.abc import Iterable, Mapping
import difflib
import math
from typing import Any, NamedTuple

from diloco_jax import presets
from diloco_jax.errors import Problem
from diloco_jax.protocol import settings

Flat = dict[str, Any]  # setting by dotted path

# Tests hold these against the code that implements each choice.
CHOICES: dict[str, tuple[str, ...]] = {
  'preset': tuple(sorted(presets.PRESETS)),
  'task': ('language_model',),
  'inner.optimizer': ('adamw',),
  'outer.rule': ('nesterov', 'sgd'),
  'sync.round_members': ('all', 'each'),
  'sync.adopt': settings.ADOPTIONS,
  'sync.merge': ('mean', 'rda'),
  'sync.upload': ('bf16', 'f32'),
  'sync.download': ('bf16', 'f32'),
  'launch.runtime': ('processes', 'threads'),
}


class Range(NamedTuple):
  """What a number may be."""

  low: float = 0
  high: float = math.inf
  above_low: bool = False
  below_high: bool = False

  def holds(self, value: float) -> bool:
    """Whether the value is finite and inside."""
    return (
      math.isfinite(value)
      and (value > self.low if self.above_low else value >= self.low)
      and (value < self.high if self.below_high else value <= self.high)
    )

  def __str__(self) -> str:
    low = f'{">" if self.above_low else ">="} {self.low:g}'
    if self.high == math.inf:
      return f'a number {low}'
    return (
      f'a number {low} and {"<" if self.below_high else "<="} {self.high:g}'
    )


POSITIVE = Range(0, above_low=True)
COUNT = Range(1)
FRACTION = Range(0, 1, below_high=True)
OFF_OR_COUNT = Range(-1)  # -1: off

# Every other number must be >= 0.
RANGES: dict[str, Range] = {
  'seed': Range(0, 2**32 - 1),
  'islands': COUNT,
  'steps': COUNT,
  'model.vocab': Range(256),  # a token is a byte
  'model.width': COUNT,
  'model.depth': COUNT,
  'model.heads': COUNT,
  'model.mlp_ratio': POSITIVE,
  'model.rope_theta': POSITIVE,
  'data.sequence': COUNT,
  'data.batch': COUNT,
  'inner.lr': POSITIVE,
  'inner.total_steps': COUNT,
  'inner.min_lr_ratio': Range(0, 1),
  'inner.beta1': FRACTION,
  'inner.beta2': FRACTION,
  'inner.accumulate': COUNT,
  'outer.lr': POSITIVE,
  'outer.momentum': FRACTION,
  'sync.fragments': COUNT,
  'sync.period': COUNT,
  'sync.alpha': Range(0, 1),
  'sync.staleness_max': OFF_OR_COUNT,
  'sync.token_budget': OFF_OR_COUNT,
  'mesh.data': OFF_OR_COUNT,
  'mesh.fsdp': OFF_OR_COUNT,
  'mesh.tensor': OFF_OR_COUNT,
  'mesh.expert': OFF_OR_COUNT,
  'metrics.eval_tokens': COUNT,
  'metrics.reference': Range(-math.inf),
  'launch.port': Range(0, 65535),
  'sync.limits.lease_s': POSITIVE,
  'sync.limits.report_every_s': POSITIVE,
  'sync.limits.tick_s': POSITIVE,
  'sync.limits.hello_retry_s': POSITIVE,
  'sync.limits.estimate_decay': Range(0, 1, above_low=True),
  'sync.limits.winsor_factor': COUNT,
  'sync.limits.norm_factor_max': Range(1, above_low=True),
  'sync.limits.norm_window': COUNT,
  'sync.limits.norm_window_min': COUNT,
  'sync.limits.offences_max': COUNT,
  'sync.limits.islands_max': COUNT,
}

# (path, the only value of this version, what it would be for)
LATER = (
  ('chaos', '', 'fault plans'),
  ('checkpoint.every_s', 0.0, 'checkpoints of islands and syncer'),
  ('checkpoint.keep', 3, 'checkpoints of islands and syncer'),
  ('sync.limits.snapshot_every_s', 0.0, 'checkpoints of islands and syncer'),
  ('sync.limits.checkpoint_every_s', 0.0, 'checkpoints of islands and syncer'),
  ('sync.limits.donors_max', 0, 'inner state from a peer'),
)


def nearest(path: str, known: Iterable[str]) -> str:
  """The known path that was probably meant; '' for none."""
  known = sorted(known)
  tail = path.rsplit('.', 1)[-1]
  for other in known:
    if other.rsplit('.', 1)[-1] == tail:
      return other
  close = difflib.get_close_matches(path, known, n=1, cutoff=0.6)
  if close:
    return close[0]
  tails = {other.rsplit('.', 1)[-1]: other for other in known}
  close = difflib.get_close_matches(tail, list(tails), n=1, cutoff=0.6)
  return tails[close[0]] if close else ''


def unknown_key(where: str, path: str, known: Iterable[str]) -> Problem:
  """The problem of a key that no configuration has."""
  guess = nearest(path, known)
  return Problem(
    where,
    'an unknown key',
    'one of those in default_config() of diloco_jax/config.py',
    f'did you mean {guess}?' if guess else 'see diloco_jax/config.py',
  )


def divisors(number: int, most: int) -> tuple[int, ...]:
  """All whole divisors of a number, up to `most`, ascending."""
  small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
  every = {*small, *(number // d for d in small)}
  return tuple(sorted(d for d in every if d <= most))


def fit_structure(
  values: Flat, template: Mapping[str, tuple[type, Any]]
) -> tuple[Flat, list[Problem]]:
  """The settings with a fitting type; defaults stand in for the others.

  Args:
    values: as the user has them.
    template: (type, default) of every setting.
  """
  problems = [
    unknown_key(path, path, template)
    for path in sorted(values.keys() - template.keys())
  ]
  fitting: Flat = {}
  missing = []
  for path, (kind, default) in template.items():
    fitting[path] = default
    if path not in values:
      missing.append(path)
      continue
    value = values[path]
    if kind is float and type(value) is int:
      value = float(value)
    if type(value) is kind or (value is None and default is None):
      fitting[path] = value
    else:
      problems.append(Problem(path, repr(value), kind.__name__, ''))
  if missing:
    more = f' and {len(missing) - 3} more' if len(missing) > 3 else ''
    problems.append(
      Problem(
        f'{", ".join(missing[:3])}{more}',
        'nothing',
        'a value for every key',
        'start from default_config()',
      )
    )
  return fitting, problems


def check_values(flat: Flat) -> list[Problem]:
  """Choices and ranges, each setting for itself. None passes: not set."""
  problems = []
  for path, value in sorted(flat.items()):
    if value is None:
      continue
    if path == 'preset' and value in presets.NOT_IN_THIS_VERSION:
      problems.append(
        Problem(
          path,
          value,
          _listed(CHOICES[path]),
          f'{value} is not in this version',
        )
      )
    elif path in CHOICES and value not in CHOICES[path]:
      guess = difflib.get_close_matches(value, CHOICES[path], n=1)
      fix = f'did you mean {guess[0]}?' if guess else ''
      problems.append(Problem(path, value or "''", _listed(CHOICES[path]), fix))
    elif type(value) in (int, float):
      allowed = RANGES.get(path, Range())
      if not allowed.holds(value):
        problems.append(Problem(path, str(value), str(allowed), ''))
  for path, only, what in LATER:
    if flat.get(path) != only:
      problems.append(
        Problem(
          path,
          str(flat.get(path)),
          repr(only),
          f'{what} are not in this version',
        )
      )
  return problems


def _listed(names: Iterable[str]) -> str:
  return f'one of {", ".join(names)}'


def check_sync(flat: Flat, given: Mapping[str, Any]) -> list[Problem]:
  """Settings of `sync` against each other. `given`: set by the user."""
  problems = []
  islands, quorum = flat['islands'], flat['sync.quorum']
  fragments, period = flat['sync.fragments'], flat['sync.period']
  each = flat['sync.round_members'] == 'each'
  if quorum > islands:
    problems.append(
      Problem(
        'sync.quorum',
        str(quorum),
        f'0 (all live islands) to islands = {islands}',
        'lower sync.quorum or raise islands',
      )
    )
  if each and quorum > 1:
    problems.append(
      Problem(
        'sync.quorum',
        str(quorum),
        '0 or 1 with sync.round_members=each',
        "every round is one island's own",
      )
    )
  # A number of fragments from the preset is lowered, see `resolve_layout`.
  if 'sync.fragments' in given and period % fragments:
    possible = ', '.join(map(str, divisors(period, period)))
    problems.append(
      Problem(
        'sync.fragments',
        str(fragments),
        f'a divisor of sync.period = {period}: {possible}',
        'H/P inner steps pass between rounds, and must be whole',
      )
    )
  if (flat['sync.block'] or each) and flat['sync.overlap'] >= period:
    problems.append(
      Problem(
        'sync.overlap',
        str(flat['sync.overlap']),
        f'fewer steps than sync.period = {period}',
        'an island waits for the merge of a capture before the next is due',
      )
    )
  if 'sync.alpha' in given and flat['sync.adopt'] != settings.BLEND:
    problems.append(
      Problem(
        'sync.alpha',
        str(flat['sync.alpha']),
        f'sync.adopt=blend; {flat["sync.adopt"]} does not use it',
        'drop sync.alpha or set sync.adopt=blend',
      )
    )
  return problems


def check_limits(flat: Flat) -> list[Problem]:
  """Limits of the protocol against each other."""
  problems = []
  islands, most = flat['islands'], flat['sync.limits.islands_max']
  if islands > most:
    problems.append(
      Problem(
        'islands',
        str(islands),
        f'at most sync.limits.islands_max = {most}',
        '',
      )
    )
  for small, large in (
    ('report_every_s', 'lease_s'),
    ('tick_s', 'lease_s'),
    ('norm_window_min', 'norm_window'),
  ):
    low, high = flat[f'sync.limits.{small}'], flat[f'sync.limits.{large}']
    if low > high:
      problems.append(
        Problem(
          f'sync.limits.{small}',
          str(low),
          f'at most sync.limits.{large} = {high}',
          '',
        )
      )
  return problems


def check_island(flat: Flat, batch: int) -> list[Problem]:
  """Settings of one island against each other; devices come later.

  Args:
    flat: every setting.
    batch: sequences a step on one island.
  """
  problems = []
  axes = ('data', 'fsdp', 'tensor', 'expert')
  sizes = {axis: flat[f'mesh.{axis}'] for axis in axes}
  problems += [
    Problem(f'mesh.{axis}', '0', '-1 (all the others) or a number >= 1', '')
    for axis in axes
    if sizes[axis] == 0
  ]
  rest = [axis for axis in axes if sizes[axis] == -1]
  if len(rest) > 1:
    problems.append(
      Problem(
        f'mesh.{rest[1]}',
        str(sizes[rest[1]]),
        f'at most one axis that takes the rest; mesh.{rest[0]} does',
        'give all but one axis its number of devices',
      )
    )
  parts = max(1, sizes['data']) * max(1, sizes['fsdp'])
  parts *= flat['inner.accumulate']
  if batch % parts:
    problems.append(
      Problem(
        'data.batch',
        str(flat['data.batch']),
        'a multiple of mesh.data * mesh.fsdp * inner.accumulate'
        f' = {parts} on each island',
        '',
      )
    )
  width, heads = flat['model.width'], flat['model.heads']
  if width % (2 * heads):
    problems.append(
      Problem(
        'model.width',
        str(width),
        f'a multiple of 2 * model.heads = {2 * heads}',
        'rotary positions turn pairs of features of a head',
      )
    )
  return problems
