"""Configuration: a mutable ConfigDict at the border, a frozen RunConfig inside.

Every key is declared here, once, with its unit. What is left to the preset is
a typed placeholder, so that a setting is always told from a default.
"""

from collections.abc import Iterable
import dataclasses
import json
import pathlib
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from diloco_jax import config_check
from diloco_jax import config_json
from diloco_jax import presets
from diloco_jax import run_config
from diloco_jax.errors import Problem
from diloco_jax.errors import UserError
from diloco_jax.protocol import settings
from diloco_jax.run_config import RunConfig

Flat = dict[str, Any]  # setting by dotted path
Section = dict[str, Any]  # setting by name


def _model() -> Section:
  return {
    'vocab': 256,  # tokens: bytes
    'width': 64,  # features of the residual stream
    'depth': 2,  # layers
    'heads': 4,  # attention heads; width / heads must be whole and even
    'mlp_ratio': 2.75,  # features of the gated MLP / width
    'tie_embeddings': False,  # one matrix for input and output
    'qk_norm': False,  # normalise queries and keys, with a learned gain
    'rope_theta': 100.0,  # base of the rotary wavelengths, positions
    'remat': False,  # recompute layers in the backward pass: memory for time
  }


def _data() -> Section:
  return {
    'path': '',  # text file, folder or JSONL; '': the standard library's source
    'sequence': 128,  # tokens predicted in one sequence
    'batch': 8,  # sequences a step, per island
  }


def _inner() -> Section:
  return {
    'optimizer': 'adamw',
    'lr': 6e-3,  # peak learning rate
    'warmup_steps': 50,  # inner steps of linear warm-up
    'total_steps': placeholder(int),  # inner steps of the cosine; left: `steps`
    'min_lr_ratio': 0.1,  # last learning rate / peak; it stays there
    'weight_decay': 0.1,  # of matrices, a factor of the learning rate
    'beta1': 0.9,  # decay of the first moment
    'beta2': 0.95,  # decay of the second moment
    'clip': 1.0,  # largest global norm of the gradient; 0: not clipped
    'accumulate': 1,  # parts of a batch, one after the other
    'bf16': False,  # multiply in bfloat16, parameters stay f32
    'rewarm': 0,  # inner steps of a newcomer's ramp without moments
  }


def _outer() -> Section:
  return {
    'rule': placeholder(str),  # nesterov, sgd
    'lr': placeholder(float),  # η
    'momentum': placeholder(float),  # μ
  }


def _sync() -> Section:
  return {
    'fragments': placeholder(int),  # P, parts that are merged in turn
    'period': placeholder(int),  # H, inner steps between syncs of a fragment
    'overlap': placeholder(int),  # τ, inner steps from capture to adoption
    'quorum': placeholder(int),  # K, islands; 0: all live ones
    'grace_gamma': placeholder(float),  # γ, share of the slack that is waited
    'grace_steps_max': placeholder(float),  # inner steps; 0: no grace window
    'block': placeholder(bool),  # true: lock step, islands wait for a merge
    'round_members': placeholder(str),  # all, each: a round is one island's
    'adopt': placeholder(str),  # overwrite, blend, rebase
    'alpha': placeholder(float),  # blend: share of the local value that stays
    'merge': placeholder(str),  # mean, rda (radial-directional averaging)
    'staleness_max': -1,  # versions; older contributions are refused; -1: off
    'token_budget': -1,  # merged tokens that end the run; -1: none
    'upload': 'f32',  # codec of contributions: f32, bf16
    'download': 'f32',  # codec of broadcasts: f32, bf16
    # Timeouts, leases and factors; declared with units in protocol/settings.py.
    'limits': dataclasses.asdict(settings.Limits()),
  }


def _mesh() -> Section:
  return {
    'data': -1,  # devices of an island along each axis; -1: all the others
    'fsdp': 1,  # parameters are split, the batch too
    'tensor': 1,  # matrices are split
    'expert': 1,
  }


def _launch() -> Section:
  return {
    'runtime': 'processes',  # processes, threads
    'step_floor_ms': 0.0,  # an inner step takes at least this long
    'address': '127.0.0.1',  # the syncer listens here
    'port': 0,  # 0: any free one
    'pin_cores': True,  # one core for each island process, in turn
    'transport': {
      'chunk_bytes': 1 << 20,  # of one piece of a payload on the stream
      'message_bytes_max': 1 << 34,  # larger payloads are refused
      'inflight_bytes_max': 1 << 34,  # not yet sent, per connection
      'queue_max': 4096,  # messages not yet sent, per connection
      'connect_timeout_s': 10.0,
      'deadline_s': 60.0,  # a stream without progress is given up after
      'backoff_first_s': 0.1,  # before connecting again, doubling
      'backoff_max_s': 5.0,
      'keepalive_s': 10.0,
      'tls_cert': '',  # PEM files; '': no TLS
      'tls_key': '',
      'tls_ca': '',
      'mutual_tls': False,  # islands show a certificate too
    },
  }


def _checkpoint() -> Section:
  return {
    'every_s': 0.0,  # seconds between saves; 0: only the final model
    'keep': 3,  # saves kept
  }


def _metrics() -> Section:
  return {
    'reference': placeholder(float),  # eval loss to compare with, nats/token
    'eval_every_s': 10.0,  # seconds between evaluations; 0: only at the end
    'eval_tokens': 65_536,  # held-out tokens of an evaluation during training
    'tensorboard': True,  # write event files
    'tape_payloads': False,  # keep every merge's arrays: small runs only
  }


def default_config() -> ConfigDict:
  """All settings with their defaults: every file starts from here.

  Not locked, so that `check` names all unknown keys of a file at once; the
  command line locks it before the flags come in.
  """
  config = ConfigDict(
    {
      'seed': 0,  # every random stream of the run comes from it
      'preset': presets.DECOUPLED_DILOCO,  # fills in what sync and outer leave
      'islands': 4,  # M
      'steps': 600,  # global steps of the run
      'task': 'language_model',  # what is trained
      'model': _model(),
      'data': _data(),
      'inner': _inner(),
      'outer': _outer(),
      'sync': _sync(),
      'mesh': _mesh(),
      'launch': _launch(),
      'checkpoint': _checkpoint(),
      'chaos': '',  # path of a plan of faults; '': none
      'metrics': _metrics(),
    }
  )
  return config.unlock()


def leaf_types(config: ConfigDict, prefix: str = '') -> dict[str, type]:
  """The type of every setting by its dotted path."""
  types: dict[str, type] = {}
  for name in config:
    path = run_config.join(prefix, name)
    if config.get_type(name) is ConfigDict:
      types.update(leaf_types(config[name], path))
    else:
      types[path] = config.get_type(name)
  return types


def _template() -> dict[str, tuple[type, Any]]:
  config = default_config()
  flat = run_config.flatten(config.to_dict())
  return {path: (kind, flat[path]) for path, kind in leaf_types(config).items()}


def check(
  config: Any, flags: Iterable[str] = (), async_mode: bool | None = None
) -> tuple[Flat, tuple[str, ...]]:
  """Every setting, and the paths of the preset settings that were given.

  Imports no jax. For the arguments see `resolve`. Raises UserError with every
  problem that can be found without devices.
  """
  if not isinstance(config, ConfigDict):
    name = type(config).__name__
    problem = Problem(
      'get_config()', name, 'a ConfigDict', 'return default_config(), changed'
    )
    raise UserError([problem])
  template = _template()
  flat, problems = config_check.fit_structure(
    run_config.flatten(config.to_dict()), template
  )
  wrong = config_check.check_values(flat)
  problems += wrong
  for problem in wrong:
    # Defaults stand in for the rest of the checks.
    flat[problem.where] = template[problem.where][1]
  given_flags = frozenset(flags)
  problems += presets.choose_mode(flat, given_flags, async_mode)
  if flat['preset'] == presets.DATA_PARALLEL:
    problems += presets.settle_data_parallel(flat, given_flags)
  given = presets.fill_in(flat)
  if flat['inner.total_steps'] is None:
    flat['inner.total_steps'] = flat['steps']
  else:
    given['inner.total_steps'] = flat['inner.total_steps']
  problems += config_check.check_sync(flat, given)
  problems += config_check.check_limits(flat)
  whole = flat['preset'] == presets.DATA_PARALLEL
  batch = flat['data.batch'] * (flat['islands'] if whole else 1)
  problems += config_check.check_island(flat, batch)
  if problems:
    raise UserError(problems)
  return flat, tuple(sorted(given))


def resolve(
  config: ConfigDict,
  *,
  flags: Iterable[str] = (),
  async_mode: bool | None = None,
) -> RunConfig:
  """The frozen configuration of a run.

  Args:
    config: as made by a config file and its overrides.
    flags: dotted paths that were set on the command line.
    async_mode: False is short for the preset diloco: settings that a file
      makes for its own preset do not count then, flags do. None: not given.

  Raises:
    UserError: every problem that can be found without devices and without
      the model; `resolve_layout` and the mesh find the others.
  """
  flat, given = check(config, flags, async_mode)
  return config_json.build(run_config.unflatten(flat), given)


def resolve_layout(
  run: RunConfig, tensor_count: int
) -> tuple[RunConfig, tuple[str, ...]]:
  """Fits the number of fragments P to H and to the model.

  A P left to the preset is lowered to the largest divisor of H that the
  number of tensors allows; a P that the user gave is taken or refused.

  Returns:
    The configuration, and messages for the user about what was changed.

  Raises:
    UserError: the given P is larger than the number of tensors.
  """
  assert tensor_count >= 1
  wanted, period = run.sync.fragments, run.sync.period
  possible = config_check.divisors(period, tensor_count)
  if wanted in possible:
    return run, ()
  if 'sync.fragments' in run.given:
    raise UserError(
      [
        Problem(
          'sync.fragments',
          str(wanted),
          f'one of {", ".join(map(str, possible))}',
          f'the model has {tensor_count} tensors, and H/P must be whole',
        )
      ]
    )
  fragments = max(p for p in possible if p <= wanted)
  sync = dataclasses.replace(run.sync, fragments=fragments)
  message = (
    f'sync.fragments lowered from {wanted} to {fragments}: the largest divisor'
    f' of sync.period = {period} that {tensor_count} tensors allow'
  )
  return dataclasses.replace(run, sync=sync), (message,)


def protocol_settings(
  run: RunConfig, sizes: tuple[int, ...], fingerprint: str
) -> settings.Settings:
  """The protocol's view of a run whose layout is resolved.

  Args:
    run: after `resolve_layout`.
    sizes: parameters in each fragment.
    fingerprint: of the fragment layout.
  """
  sync = run.sync
  assert len(sizes) == sync.fragments, (len(sizes), sync.fragments)
  # Keeping nothing of the local value is overwriting it.
  blend_nothing = sync.adopt == settings.BLEND and sync.alpha == 0
  return settings.Settings(
    islands=run.island_count,
    sizes=sizes,
    fingerprint=fingerprint,
    config_hash=run_config.config_hash(run),
    period=sync.period,
    overlap=sync.overlap,
    steps=run.steps,
    quorum=min(sync.quorum, run.island_count),
    mode=sync.mode,
    adopt=settings.OVERWRITE if blend_nothing else sync.adopt,
    grace_gamma=sync.grace_gamma,
    grace_steps_max=sync.grace_steps_max,
    staleness_max=sync.staleness_max,
    token_budget=sync.token_budget,
    rewarm_steps=run.inner.rewarm,
    limits=sync.limits,
  )


def check_folder(workdir: pathlib.Path) -> None:
  """Raises UserError where this is no folder for a run, of whatever kind."""
  for path in (workdir, *workdir.parents):
    if path.exists() and not path.is_dir():
      raise UserError(
        [
          Problem(
            f'--workdir={workdir}',
            f'{path} is a file',
            'a folder, new or empty',
            'name another one',
          )
        ]
      )


def check_workdir(run: RunConfig, workdir: pathlib.Path) -> None:
  """Raises UserError where a new run cannot live in this folder."""
  check_folder(workdir)
  holds = [
    name
    for name in (config_json.FILE_NAME, 'tape')
    if (workdir / name).exists()
  ]
  if not holds:
    return
  try:
    there = config_json.load(workdir)
  except (UserError, OSError):
    got = 'a run whose config.json this version cannot read'
  else:
    got = _compared(run, there)
  raise UserError(
    [
      Problem(
        f'--workdir={workdir}',
        got,
        'a folder without a run',
        'taking up a run is not in this version: name another folder',
      )
    ]
  )


def _compared(run: RunConfig, there: RunConfig) -> str:
  keys = run_config.differing_keys(run, there)
  if not keys:
    return 'a run of this configuration'
  mine, theirs = run_config.to_flat(run), run_config.to_flat(there)
  shown = ', '.join(
    f'{key} ({json.dumps(theirs[key])} there, {json.dumps(mine[key])} here)'
    for key in keys[:8]
  )
  more = f' and {len(keys) - 8} more' if len(keys) > 8 else ''
  return f'a run of another configuration: {shown}{more}'
