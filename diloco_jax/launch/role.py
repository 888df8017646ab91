"""One process of a run: `python -m diloco_jax.launch.role ROLE --workdir=DIR`.

Started by the launcher. It ends by itself when the run is over, on SIGTERM
politely, and when the launcher is gone (its end of stdin closes).
"""

import argparse
from collections.abc import Callable
import faulthandler
import json
import os
import pathlib
import signal
import sys
import threading
from typing import Any

from diloco_jax import config_json
from diloco_jax import errors

ADDRESS_FILE = 'syncer.address'
TOKEN_FILE = 'token'
START_FILE = 'started.json'


def _parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog='python -m diloco_jax.launch.role')
  parser.add_argument('role', choices=('syncer', 'island'))
  parser.add_argument('--workdir', type=pathlib.Path, required=True)
  parser.add_argument('--index', type=int, default=-1)
  parser.add_argument('--core', type=int, default=-1)
  return parser.parse_args()


def _watch_launcher(stop: Callable[[str], None]) -> None:
  """Stop when the other end of stdin is closed: the launcher is gone."""

  def watch() -> None:
    # The plain descriptor: a buffered reader would be locked at exit.
    while os.read(0, 1):
      pass
    stop('launcher_gone')

  threading.Thread(target=watch, name='launcher', daemon=True).start()


def on_signals(stop: Callable[[str], None]) -> None:
  """SIGTERM stops politely, a second one at once."""
  asked = []

  def on_term(number: int, frame: Any) -> None:
    del number, frame
    if asked:
      os._exit(143)  # the second signal means now
    asked.append(True)
    stop('terminated')

  signal.signal(signal.SIGTERM, on_term)
  signal.signal(signal.SIGINT, on_term)


def started_wall_s(workdir: pathlib.Path) -> float:
  """When the run started, on the wall clock: the origin of every `t_s`."""
  text = (workdir / START_FILE).read_text(encoding='utf-8')
  return float(json.loads(text)['wall_s'])


def listen(run: Any, workdir: pathlib.Path) -> Any:
  """The syncer's end of the transport. Raises UserError."""
  from diloco_jax.launch import connecting
  from diloco_jax.transport import grpc

  token = connecting.read_token(workdir / TOKEN_FILE)
  return grpc.serve(
    f'{run.launch.address}:{run.launch.port}', token, run.launch.transport
  )


def run_syncer(
  run: Any,
  task: Any,
  workdir: pathlib.Path,
  endpoint: Any,
  on_made: Callable[[Any], None] | None = None,
) -> str:
  """A syncer in this process, to its end; returns why it ended."""
  from diloco_jax.launch import assembly
  from diloco_jax.launch.syncing import Syncer
  from diloco_jax.runtime.clock import RealClock

  planned = assembly.layout(run, assembly.param_shapes(task, run.seed))
  syncer = Syncer(
    planned,
    task,
    workdir=workdir,
    endpoint=endpoint,
    clock=RealClock(started_wall_s(workdir)),
    tensorboard=run.metrics.tensorboard,
  )
  on_signals(syncer.stop)
  if on_made is not None:
    on_made(syncer)
  partial = workdir / f'{ADDRESS_FILE}.partial'
  partial.write_text(endpoint.address, encoding='utf-8')
  partial.replace(workdir / ADDRESS_FILE)
  return syncer.run()


def _syncer(args: argparse.Namespace) -> int:
  from diloco_jax.launch import assembly

  run = config_json.load(args.workdir)
  endpoint = listen(run, args.workdir)
  run_syncer(
    run,
    assembly.make_task(run),
    args.workdir,
    endpoint,
    on_made=lambda syncer: _watch_launcher(syncer.stop),
  )
  return 0


def _island(args: argparse.Namespace) -> int:
  from diloco_jax.launch import assembly
  from diloco_jax.launch import connecting
  from diloco_jax.launch import islanding
  from diloco_jax.runtime.clock import RealClock

  run = config_json.load(args.workdir)
  address = (args.workdir / ADDRESS_FILE).read_text(encoding='utf-8')
  token = connecting.read_token(args.workdir / TOKEN_FILE)
  leave: list[str] = []
  _watch_launcher(leave.append)
  on_signals(leave.append)
  ready = args.workdir / 'run' / f'island_{args.index}.ready'
  outcome = islanding.run_island(
    run,
    assembly.make_task(run),
    index=args.index,
    workdir=args.workdir,
    endpoint=connecting.open_endpoint(address, token, run.launch.transport),
    clock=RealClock(started_wall_s(args.workdir)),
    on_ready=lambda trainer: ready.touch(),
    should_leave=lambda: leave[0] if leave else '',
  )
  print(f'island {args.index}: {outcome.reason} after {outcome.steps} steps')  # noqa: T201
  return 0


def main() -> int:
  """Runs one role to its end."""
  faulthandler.enable()
  # Threads of the exchange may not keep the training thread from its core.
  sys.setswitchinterval(0.0005)
  args = _parse()
  if args.core >= 0 and hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {args.core})
  try:
    return {'syncer': _syncer, 'island': _island}[args.role](args)
  except errors.UserError as e:
    print(e, file=sys.stderr)  # noqa: T201
    return errors.UserError.EXIT_CODE


if __name__ == '__main__':
  sys.exit(main())
