"""The frozen configuration of a run: its tree, its fields, its hash.

A field is either `run` (the syncer's: an island gets it on joining) or
`island` (local to each island: mesh, batch, paths, speed, launch). The hash
covers the `run` fields that may not change when a run is taken up again.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

from diloco_jax import presets
from diloco_jax.protocol import settings

if TYPE_CHECKING:
  from diloco_jax.algorithm import outer as outer_lib
  from diloco_jax.data import samples
  from diloco_jax.island import sharding
  from diloco_jax.island import trainer
  from diloco_jax.models import transformer
  from diloco_jax.transport import base as transport_base

Flat = dict[str, Any]  # setting by dotted path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions:
  """How islands and syncer exchange fragments; see `config.default_config`."""

  fragments: int  # P
  period: int  # H
  overlap: int  # τ
  quorum: int  # K; 0: all live islands
  grace_gamma: float
  grace_steps_max: float
  staleness_max: int
  token_budget: int
  block: bool
  round_members: str
  adopt: str
  alpha: float
  merge: str
  upload: str
  download: str
  limits: settings.Limits

  @property
  def mode(self) -> str:
    """The mode of the protocol's machines."""
    if self.round_members == 'each':
      return settings.EACH
    return settings.LOCK_STEP if self.block else settings.FREE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
  """Who runs where."""

  runtime: str
  step_floor_ms: float
  address: str
  port: int
  pin_cores: bool
  transport: 'transport_base.TransportOptions'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
  """When islands and syncer save."""

  every_s: float
  keep: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions:
  """What is measured, and how often."""

  reference: float | None
  eval_every_s: float
  eval_tokens: int
  tensorboard: bool
  tape_payloads: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
  """Everything about a run, checked. Made by `config.resolve` only."""

  seed: int
  preset: str
  islands: int  # M
  steps: int  # global steps
  task: str
  chaos: str
  model: 'transformer.ModelOptions'
  data: 'samples.DataOptions'
  inner: 'trainer.InnerOptions'
  outer: 'outer_lib.OuterOptions'
  sync: SyncOptions
  mesh: 'sharding.MeshOptions'
  launch: LaunchOptions
  checkpoint: CheckpointOptions
  metrics: MetricsOptions
  given: tuple[str, ...] = ()  # of GIVEN_PATHS, what the user set

  @property
  def island_count(self) -> int:
    """Islands started: data_parallel is one island."""
    return 1 if self.preset == presets.DATA_PARALLEL else self.islands

  @property
  def island_batch(self) -> int:
    """Sequences a step on each island; data_parallel has them all on one."""
    return self.data.batch * (self.islands // self.island_count)


# Settings that follow others unless they are given.
GIVEN_PATHS = (*presets.PRESET_PATHS, 'inner.total_steps')

# Dotted paths, each for itself and all below it.
ISLAND_FIELDS = (
  'chaos',  # whoever starts processes injects the faults
  'data.batch',
  'data.path',
  'inner.accumulate',
  'launch',
  'mesh',
  'model.remat',
)
RUN_FIELDS = (
  'checkpoint',
  'data.sequence',
  'inner',
  'islands',
  'metrics',
  'model',
  'outer',
  'preset',
  'seed',
  'steps',
  'sync',
  'task',
)
# `run` fields that may change when a run is taken up again.
CHANGEABLE_FIELDS = ('checkpoint', 'islands', 'metrics', 'steps')


def _covers(prefixes: Iterable[str], path: str) -> bool:
  return any(path == p or path.startswith(f'{p}.') for p in prefixes)


def is_run_field(path: str) -> bool:
  """Whether the field is the syncer's rather than each island's own."""
  return _covers(RUN_FIELDS, path) and not _covers(ISLAND_FIELDS, path)


def section_classes() -> dict[str, type]:
  """The dataclass behind every section, by dotted path.

  Imported when asked for: mistakes in a configuration are found and told
  without the seconds that importing jax takes.
  """
  from diloco_jax.algorithm import outer as outer_lib
  from diloco_jax.data import samples
  from diloco_jax.island import sharding
  from diloco_jax.island import trainer
  from diloco_jax.models import transformer
  from diloco_jax.transport import base as transport_base

  return {
    '': RunConfig,
    'model': transformer.ModelOptions,
    'data': samples.DataOptions,
    'inner': trainer.InnerOptions,
    'outer': outer_lib.OuterOptions,
    'sync': SyncOptions,
    'sync.limits': settings.Limits,
    'mesh': sharding.MeshOptions,
    'launch': LaunchOptions,
    'launch.transport': transport_base.TransportOptions,
    'checkpoint': CheckpointOptions,
    'metrics': MetricsOptions,
  }


def join(prefix: str, name: str) -> str:
  """A dotted path below another; '' is the top."""
  return f'{prefix}.{name}' if prefix else name


def flatten(tree: Mapping[str, Any], prefix: str = '') -> Flat:
  """A nested dict as {dotted path: leaf}."""
  flat = {}
  for name, value in tree.items():
    path = join(prefix, name)
    if isinstance(value, Mapping):
      flat.update(flatten(value, path))
    else:
      flat[path] = value
  return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
  """The inverse of `flatten`."""
  tree: dict[str, Any] = {}
  for path, value in flat.items():
    *sections, name = path.split('.')
    level = tree
    for section in sections:
      level = level.setdefault(section, {})
    level[name] = value
  return tree


def to_tree(run: RunConfig) -> dict[str, Any]:
  """The configuration as nested dicts of JSON values."""
  tree = dataclasses.asdict(run)
  tree['given'] = list(run.given)
  return tree


def to_flat(run: RunConfig) -> Flat:
  """Every setting by its dotted path."""
  flat = flatten(to_tree(run))
  del flat['given']
  return flat


def _hashed(run: RunConfig) -> Flat:
  hashed = {
    path: value
    for path, value in to_flat(run).items()
    if is_run_field(path) and not _covers(CHANGEABLE_FIELDS, path)
  }
  if 'inner.total_steps' not in run.given:
    hashed['inner.total_steps'] = None  # follows `steps`, which may change
  return hashed


def config_hash(run: RunConfig) -> str:
  """Hex SHA-256 of the settings that make this configuration another one."""
  text = json.dumps(_hashed(run), sort_keys=True, allow_nan=False)
  return hashlib.sha256(text.encode()).hexdigest()


def differing_keys(a: RunConfig, b: RunConfig) -> tuple[str, ...]:
  """Dotted paths, sorted, in which the two are different configurations.

  Empty exactly where their hashes are equal.
  """
  one, two = _hashed(a), _hashed(b)
  assert one.keys() == two.keys()
  return tuple(sorted(path for path in one if one[path] != two[path]))
