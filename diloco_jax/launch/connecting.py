"""From an address to a joined island."""

from collections.abc import Callable
import pathlib
import random
import time
from typing import Any
import uuid

from diloco_jax import config_json
from diloco_jax.errors import Problem
from diloco_jax.errors import UserError
from diloco_jax.island.evaluator import Evaluator
from diloco_jax.island.hook import Island
from diloco_jax.island.hook import JoinError
from diloco_jax.launch import assembly
from diloco_jax.protocol import island_state
from diloco_jax.protocol import messages as m
from diloco_jax.run_config import RunConfig
from diloco_jax.run_config import config_hash
from diloco_jax.runtime.clock import Clock
from diloco_jax.runtime.clock import RealClock
from diloco_jax.telemetry import machine_lines
from diloco_jax.transport import base as transport
from diloco_jax.transport import grpc

CONNECT_TIMEOUT_S = 60.0


def open_endpoint(
  address: str, token: str, options: transport.TransportOptions
) -> transport.Endpoint:
  """A connection to a syncer, made and kept up in the background."""
  return grpc.connect(
    address, token, options, rng=random.Random(uuid.uuid4().int)
  )


def ask_config(
  endpoint: transport.Endpoint,
  *,
  address: str,
  given: tuple[tuple[str, str], ...] = (),
  timeout_s: float = CONNECT_TIMEOUT_S,
) -> RunConfig:
  """The configuration of the run at the other end.

  Args:
    endpoint: to a syncer.
    address: for the message.
    given: what this island was told about `run` fields, as (path, JSON).
    timeout_s: for the answer.

  Raises:
    UserError: no syncer answers, the token is refused, or a given field
      differs from the run's.
  """
  deadline = time.monotonic() + timeout_s
  while (left := deadline - time.monotonic()) > 0:
    for item in endpoint.receive(min(left, 1.0)):
      if isinstance(item, transport.PeerUp):
        endpoint.send(
          item.peer,
          m.AskConfig(protocol_version=m.PROTOCOL_VERSION, given=given),
        )
      elif isinstance(item, transport.TokenRefused):
        raise UserError(
          [
            Problem(
              f'syncer {address}',
              'the token was refused',
              "the run's token",
              'pass --token_file=DIR/token of the run',
            )
          ]
        )
      elif isinstance(item, transport.Delivery):
        return _answer(item.message, given)
  raise UserError(
    [
      Problem(
        f'syncer {address}',
        f'no answer within {timeout_s:g} s',
        'a running syncer',
        'check the address, the port and the firewall',
      )
    ]
  )


def _answer(
  message: m.Message, given: tuple[tuple[str, str], ...]
) -> RunConfig:
  if isinstance(message, m.Refusal):
    raise refused(message.reason, message.detail)
  assert isinstance(message, m.RunConfig), message
  run = config_json.from_json(message.config_json)
  problems = config_json.check_given(run, given)
  if problems:
    raise UserError(list(problems))
  return run


def refused(reason: str, detail: str) -> UserError:
  """The syncer would not have this island."""
  return UserError(
    [Problem('joining', reason, 'an island of this run', detail)]
  )


def make_island(
  planned: assembly.Layout,
  endpoint: transport.Endpoint,
  params: Any,
  *,
  put: Callable[[Any], Any],
  shardings: Any = None,
  index: int = -1,
  clock: Clock | None = None,
  journal: Any = None,
  seeds_state: bool = False,
  samples_per_step: int = 0,
) -> Island:
  """An island that has not joined yet."""
  state = island_state.initial(
    planned.settings,
    nonce=uuid.uuid4().hex,
    island=index,
    seeds_state=seeds_state,
    samples_per_step=samples_per_step,
  )
  if journal is not None:
    journal.begin(machine_lines.island_fields(state))
  return Island(
    state=state,
    fragments=assembly.make_fragments(planned, shardings),
    endpoint=endpoint,
    params=params,
    put=put,
    clock=clock,
    journal=journal,
    tape=journal,
  )


def make_evaluator(
  planned: assembly.Layout,
  endpoint: transport.Endpoint,
  params_like: Any,
  clock: Clock,
) -> Evaluator:
  """A subscriber to Θ."""
  return Evaluator(
    state=island_state.initial(
      planned.settings, nonce=uuid.uuid4().hex, role=m.EVALUATOR
    ),
    fragments=assembly.make_fragments(planned),
    endpoint=endpoint,
    params_like=params_like,
    clock=clock,
  )


def connect(
  address: str,
  params: Any,
  *,
  token: str,
  config: RunConfig | None = None,
  index: int = -1,
  timeout_s: float | None = None,
) -> Island:
  """Join a running syncer with any training loop's parameters.

  Blocks until training may start; then `island.params` are the run's.

  Args:
    address: HOST:PORT of the syncer.
    params: pytree of arrays: shapes, dtypes, shardings, and the start values
      if the syncer has none.
    token: of the run (DIR/token).
    config: what this island believes the run to be; None: the syncer's.
    index: wanted island index; -1: any free one.
    timeout_s: for joining; None: as long as it takes.

  Raises:
    UserError: the token, the layout or the configuration does not fit.
    JoinError: joining failed or took too long.
  """
  import jax

  options = (
    config.launch.transport
    if config is not None
    else transport.TransportOptions()
  )
  endpoint = open_endpoint(address, token, options)
  try:
    run = ask_config(endpoint, address=address)
    if config is not None and config_hash(config) != config_hash(run):
      raise refused('config_hash', 'the configuration is not that of the run')
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params
    )
    planned = assembly.layout(run, shapes)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    island = make_island(
      planned,
      endpoint,
      params,
      put=lambda host: jax.tree.map(
        lambda x, s, like: jax.device_put(x.astype(like.dtype), s),
        host,
        shardings,
        shapes,
      ),
      shardings=shardings,
      index=index,
      clock=RealClock(),
      seeds_state=True,
    )
    join(island, timeout_s)
  except BaseException:
    endpoint.close()
    raise
  return island


def join(
  island: Island,
  timeout_s: float | None = None,
  should_leave: Callable[[], str] | None = None,
) -> None:
  """`Island.join`, with a refusal of the syncer as a mistake of the user.

  Raises:
    UserError: the syncer would not have this island.
    JoinError: it took too long, or stopped for another reason.
  """
  try:
    island.join(timeout_s, should_leave)
  except JoinError as e:
    island.close()
    kind, _, detail = island.stop_reason.partition(': ')
    if kind == 'refused':
      reason, _, detail = detail.partition(': ')
      raise refused(reason, detail) from e
    raise


def read_token(path: pathlib.Path) -> str:
  """The token in a file. Raises UserError where there is none."""
  try:
    token = path.read_text(encoding='utf-8').strip()
  except (OSError, UnicodeDecodeError) as e:
    raise UserError(
      [
        Problem(
          f'--token_file={path}',
          str(e),
          'a readable file with the token of the run',
          'copy DIR/token from the run',
        )
      ]
    ) from e
  if not token:
    raise UserError(
      [
        Problem(
          f'--token_file={path}',
          'an empty file',
          'the token of the run',
          'copy DIR/token from the run',
        )
      ]
    )
  return token
