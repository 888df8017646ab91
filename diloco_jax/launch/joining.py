"""`island` and `syncer`: one participant of a run that others may join."""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import sys
from typing import Any

from diloco_jax import config_json
from diloco_jax import run_config
from diloco_jax.errors import Problem
from diloco_jax.errors import UserError
from diloco_jax.launch import assembly
from diloco_jax.launch import connecting
from diloco_jax.launch import islanding
from diloco_jax.launch import role
from diloco_jax.run_config import RunConfig
from diloco_jax.runtime.clock import RealClock
from diloco_jax.transport.base import TransportOptions

Given = Sequence[tuple[str, str]]  # (dotted path, value as written)


def _as_json(text: str) -> str:
  """A value as written on a command line, as JSON."""
  try:
    json.loads(text)
  except ValueError:
    return json.dumps(text)
  return text


def with_own_fields(run: RunConfig, given: Given) -> RunConfig:
  """The run's configuration with an island's own fields changed.

  Raises:
    UserError: a value does not have the type of its field.
  """
  flat = run_config.to_flat(run)
  for path, text in given:
    if path in flat and not run_config.is_run_field(path):
      flat[path] = json.loads(_as_json(text))
  return config_json.build(run_config.unflatten(flat), run.given)


def _transport_options(given: Given) -> TransportOptions:
  """What is needed before the configuration of the run is known."""
  prefix = 'launch.transport.'
  fields = {f.name: f for f in dataclasses.fields(TransportOptions)}
  changed: dict[str, Any] = {}
  for path, text in given:
    name = path.removeprefix(prefix)
    if path.startswith(prefix) and name in fields:
      wanted = type(fields[name].default)
      value = json.loads(_as_json(text))
      if wanted is float and isinstance(value, int):
        value = float(value)
      if not isinstance(value, wanted):
        raise UserError(
          [Problem(f'--config.{path}', text, wanted.__name__, '')]
        )
      changed[name] = value
  return TransportOptions(**changed)


def join(
  address: str,
  token_file: pathlib.Path,
  *,
  index: int = -1,
  workdir: pathlib.Path | None = None,
  given: Given = (),
) -> int:
  """Train as one island of the run at an address, to its end.

  Args:
    address: HOST:PORT of the syncer.
    token_file: with the run's token.
    index: wanted island index; -1: any free one.
    workdir: for this island's tape and metrics; None: none are written.
    given: settings of the command line. A `run` field must be as the run has
      it; an `island` field counts for this island.

  Raises:
    UserError: the address, the token, a setting or the layout does not fit.
  """
  token = connecting.read_token(token_file)
  as_json = tuple((path, _as_json(text)) for path, text in given)
  endpoint = connecting.open_endpoint(address, token, _transport_options(given))
  try:
    run = connecting.ask_config(endpoint, address=address, given=as_json)
    run = with_own_fields(run, given)
    leave: list[str] = []
    role.on_signals(leave.append)
    outcome = islanding.run_island(
      run,
      assembly.make_task(run),
      index=index,
      workdir=workdir,
      endpoint=endpoint,
      clock=RealClock(),
      should_leave=lambda: leave[0] if leave else '',
    )
  finally:
    endpoint.close()
  print(f'{outcome.reason} after {outcome.steps} steps')  # noqa: T201
  return 0


def serve(run: RunConfig, workdir: pathlib.Path) -> int:
  """A syncer on its own: islands join it from anywhere."""
  from diloco_jax.launch import training_run

  run, task = training_run.prepare(run, workdir)
  endpoint = role.listen(run, workdir)
  print(  # noqa: T201
    f'syncer at {endpoint.address}; islands join it by\n'
    f'  python -m diloco_jax island --syncer={endpoint.address} '
    f'--token_file={workdir / role.TOKEN_FILE}',
    file=sys.stderr,
  )
  role.run_syncer(run, task, workdir, endpoint)
  return training_run.close_books(workdir)
