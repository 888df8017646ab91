"""The family of algorithms as settings of one code.

A preset fills in what a configuration leaves open, and nothing else: any of
its settings can be given by file or flag.
"""

from typing import Any, NamedTuple

from diloco_jax.errors import Problem

DATA_PARALLEL = 'data_parallel'
DILOCO = 'diloco'
STREAMING_DILOCO = 'streaming_diloco'
ASYNC_DILOCO = 'async_diloco'
DECOUPLED_DILOCO = 'decoupled_diloco'

# A run below this many global steps is short: diloco then syncs more often.
SHORT_RUN_STEPS = 10_000
# Inner steps between two publications of Θ in data_parallel, at most.
PUBLISH_EVERY_MAX = 50


class Preset(NamedTuple):
  """Settings of `sync` and `outer`, in the units of `config.default_config`.

  None: depends on other settings, see `settings_of`.
  """

  fragments: int
  period: int | None
  overlap: int
  quorum: int
  grace_gamma: float
  grace_steps_max: float
  block: bool
  round_members: str
  adopt: str
  alpha: float
  merge: str
  rule: str
  lr: float
  momentum: float | None


PRESETS = {
  # Gradients averaged at every step: one island with the whole batch. With
  # one island, lr 1 and no momentum a merge makes Θ that island's parameters,
  # so H is only how often they are published; see PUBLISH_EVERY_MAX.
  DATA_PARALLEL: Preset(
    fragments=1,
    period=None,
    overlap=0,
    quorum=0,
    grace_gamma=0.0,
    grace_steps_max=0.0,
    block=True,
    round_members='all',
    adopt='overwrite',
    alpha=0.0,
    merge='mean',
    rule='sgd',
    lr=1.0,
    momentum=0.0,
  ),
  # arXiv 2311.08105: everyone waits, everything is merged at once.
  DILOCO: Preset(
    fragments=1,
    period=None,
    overlap=0,
    quorum=0,
    grace_gamma=0.0,
    grace_steps_max=0.0,
    block=True,
    round_members='all',
    adopt='overwrite',
    alpha=0.0,
    merge='mean',
    rule='nesterov',
    lr=0.7,
    momentum=0.9,
  ),
  # arXiv 2501.18512: one fragment at a time, overlapped with inner steps.
  STREAMING_DILOCO: Preset(
    fragments=8,
    period=24,
    overlap=2,
    quorum=0,
    grace_gamma=0.0,
    grace_steps_max=0.0,
    block=True,
    round_members='all',
    adopt='blend',
    alpha=0.5,
    merge='mean',
    rule='nesterov',
    lr=0.4,
    momentum=0.9,
  ),
  # arXiv 2604.21428: nobody waits; a quorum and a grace window close a round.
  DECOUPLED_DILOCO: Preset(
    fragments=24,
    period=24,
    overlap=2,
    quorum=1,
    grace_gamma=0.8,
    grace_steps_max=1.0,
    block=False,
    round_members='all',
    adopt='rebase',
    alpha=0.0,
    merge='rda',
    rule='nesterov',
    lr=1.0,
    momentum=None,
  ),
}

SYNCHRONOUS = (DILOCO, STREAMING_DILOCO)
# Known by name, so that asking for one gets a straight answer.
NOT_IN_THIS_VERSION = (ASYNC_DILOCO,)

OUTER_SETTINGS = ('rule', 'lr', 'momentum')
SYNC_SETTINGS = tuple(n for n in Preset._fields if n not in OUTER_SETTINGS)
Flat = dict[str, Any]  # setting by dotted path
# Dotted paths of everything that a preset fills in.
PRESET_PATHS = tuple(f'sync.{name}' for name in SYNC_SETTINGS) + tuple(
  f'outer.{name}' for name in OUTER_SETTINGS
)


def default_momentum(period: int) -> float:
  """Outer momentum μ of decoupled_diloco for a period H.

  0 where H <= 8, 0.5 where H >= 24, linear between: with few merges of each
  fragment a large μ overshoots, and merges that follow each other closely are
  correlated. Measured on small models only.
  """
  return 0.5 * min(1.0, max(0.0, (period - 8) / 16))


def settings_of(name: str, steps: int, period: int | None) -> dict[str, object]:
  """The preset's value of every path in PRESET_PATHS.

  Args:
    name: of a preset.
    steps: global steps of the run.
    period: H where the configuration sets it; the default momentum follows.
  """
  preset = PRESETS[name]
  if period is None:
    period = preset.period
  if period is None and name == DATA_PARALLEL:
    period = min(steps, PUBLISH_EVERY_MAX)
  if period is None:
    period = 30 if steps < SHORT_RUN_STEPS else 500
  momentum = preset.momentum
  if momentum is None:
    momentum = default_momentum(period)
  full = preset._replace(period=period, momentum=momentum)._asdict()
  return {path: full[path.split('.')[1]] for path in PRESET_PATHS}


def choose_mode(
  flat: Flat, flags: frozenset[str], async_mode: bool | None
) -> list[Problem]:
  """Carries out --async_mode, in place."""
  if async_mode and flat['preset'] in (*SYNCHRONOUS, DATA_PARALLEL):
    return [
      Problem(
        '--async_mode=true',
        f'config.preset={flat["preset"]}',
        f'config.preset={DECOUPLED_DILOCO}',
        'drop the flag or choose that preset',
      )
    ]
  if async_mode is not False or flat['preset'] in SYNCHRONOUS:
    return []
  if 'preset' in flags:
    return [
      Problem(
        '--async_mode=false',
        f'--config.preset={flat["preset"]}',
        f'one of {", ".join(SYNCHRONOUS)}',
        'drop one of the two flags',
      )
    ]
  flat['preset'] = DILOCO
  _forget_file_settings(flat, flags)
  return []


def _forget_file_settings(flat: Flat, flags: frozenset[str]) -> None:
  """Leaves to the preset what a file, not a flag, set for another preset."""
  for path in PRESET_PATHS:
    if path not in flags:
      flat[path] = None


def fill_in(flat: Flat) -> Flat:
  """Puts the preset's settings in place; returns those the user had set."""
  given = {path: flat[path] for path in PRESET_PATHS if flat[path] is not None}
  flat.update(
    settings_of(flat['preset'], flat['steps'], given.get('sync.period'))
  )
  flat.update(given)
  return given


def settle_data_parallel(flat: Flat, flags: frozenset[str]) -> list[Problem]:
  """Nothing is synced: a file's settings are moot, flags are mistakes."""
  problems = [
    Problem(
      f'--config.{path}',
      str(flat[path]),
      f'no such flag with preset {DATA_PARALLEL}',
      'one island averages the gradients; nothing is synced',
    )
    for path in PRESET_PATHS
    if path in flags and flat[path] is not None
  ]
  _forget_file_settings(flat, frozenset())
  return problems
