"""The syncer's role: from a configuration to the end of the run."""

from collections import deque
import pathlib
import statistics
from typing import Any

from diloco_jax import config_json
from diloco_jax.launch import assembly
from diloco_jax.launch.recording import Recorder
from diloco_jax.protocol import actions as a
from diloco_jax.protocol import invariants
from diloco_jax.protocol import syncer as machine
from diloco_jax.protocol import syncer_state as s
from diloco_jax.runtime.clock import Clock
from diloco_jax.runtime.loop import Loop
from diloco_jax.storage import parameters
from diloco_jax.storage import payloads
from diloco_jax.syncer.driver import SyncerDriver
from diloco_jax.syncer.store import Store
from diloco_jax.telemetry import machine_lines
from diloco_jax.telemetry.metrics import MetricsWriter
from diloco_jax.transport import base as transport

ROW_EVERY_S = 1.0


class Syncer:
  """A syncer that runs on the calling thread."""

  def __init__(
    self,
    planned: assembly.Layout,
    task: Any,
    *,
    workdir: pathlib.Path,
    endpoint: transport.Endpoint,
    clock: Clock,
    tensorboard: bool = False,
  ):
    self._planned = planned
    self._task = task
    self._workdir = workdir
    self._endpoint = endpoint
    self._clock = clock
    self._pace = Pace(planned.settings.fragments)
    self._recorder = Recorder(
      workdir / 'tape' / 'syncer.jsonl', clock, self._on_failure
    )
    self._metrics = MetricsWriter(
      workdir / 'metrics' / 'syncer.jsonl',
      workdir / 'metrics' / 'tensorboard' / 'syncer' if tensorboard else None,
    )
    self._store = assembly.make_store(planned)
    self._driver = SyncerDriver(
      store=self._store,
      endpoint=endpoint,
      journal=self._recorder,
      clock=clock,
      export=self._export,
      on_failure=self._on_failure,
      keep=payloads.keeper(workdir)
      if planned.run.metrics.tape_payloads
      else None,
    )
    self._loop: Loop[s.SyncerState] = Loop(
      state=machine.initial(
        planned.settings,
        config_json=config_json.to_json(planned.run),
      ),
      react=machine.react,
      check=invariants.check_syncer,
      driver=self._driver,
      clock=clock,
      tape=self._recorder,
    )
    self._driver.post = self._loop.post

  def stop(self, reason: str) -> None:
    """End the run early, from any thread: Θ is exported as it stands."""
    self._loop.post(a.StopRequested(self._clock.now(), reason))

  def run(self) -> str:
    """Until the run is over; returns why it ended.

    Raises:
      RuntimeError: the syncer failed; the cause is chained.
    """
    fields = machine_lines.syncer_fields(self._loop.state)
    now = self._recorder.begin(fields)
    self._loop.begin(machine.begin, now)
    self._driver.seed(self._start_fragments, self._planned.settings.islands)
    row_at = self._clock.now()
    while not self._loop.stopped.is_set():
      self._loop.once()
      if self._clock.now() >= row_at:
        self._row()
        row_at = self._clock.now() + ROW_EVERY_S
    self._row()
    self._driver.close()
    self._recorder.close()
    self._metrics.close()
    self._endpoint.close()
    if self._loop.failure is not None:
      raise RuntimeError('the syncer failed') from self._loop.failure
    return self._loop.stop_reason

  @property
  def state(self) -> s.SyncerState:
    return self._loop.state

  def final_parameters(self) -> Any:
    """Θ in f32, after `run` has returned."""
    shapes = assembly.param_shapes(self._task, self._planned.run.seed)
    return self._store.parameters(shapes)

  def _start_fragments(self) -> list[dict[str, Any]]:
    params = assembly.start_params(self._task, self._planned.run.seed)
    partition = self._planned.partition
    return [partition.take(params, p) for p in range(len(partition.sizes))]

  def _export(self, store: Store, global_step: int) -> str:
    del global_step
    parameters.save(self._workdir / 'model', self.final_parameters())
    return store.params_digest()

  def _on_failure(self, error: BaseException) -> None:
    self._loop.fail(error)

  def _row(self) -> None:
    state = self._loop.state
    live = [
      x for k, x in state.islands.items() if k >= 0 and x.status == s.LIVE
    ]
    traffic = self._endpoint.traffic()
    self._metrics.row(
      t_s=round(self._clock.now(), 3),
      global_step=state.global_step,
      merges=state.merges,
      live=len(live),
      participating=sum(x.participating for x in live),
      bytes_up=traffic.bytes_in,
      bytes_down=traffic.bytes_out,
      period_steps=self._pace.update(state.merges, [x.step for x in live]),
      tokens=sum(
        x.tokens for x in (*state.past, *state.islands.values()) if x.id >= 0
      ),
    )


class Pace:
  """The period reached lately: inner steps of the median island a period."""

  def __init__(self, fragments: int):
    self._fragments = fragments
    self._seen: deque[tuple[int, float]] = deque(maxlen=32)

  def update(self, merges: int, steps: list[int]) -> float | None:
    if not steps:
      return None
    self._seen.append((merges, statistics.median(steps)))
    first = self._seen[0]
    if merges - first[0] < self._fragments:
      return None
    done = self._seen[-1][1] - first[1]
    return round(done * self._fragments / (merges - first[0]), 2)
