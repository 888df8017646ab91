"""A whole run in this process, in virtual time: the same to the bit each time.

The machines, the arrays and the inner steps are those of production; time,
links and disks are simulated, so that a run of many islands needs one device
and depends on nothing but its configuration and scenario. Islands share one
compiled step.
"""

from collections.abc import Iterator
import pathlib
import tempfile
from typing import Any

from diloco_jax import algorithm as A
from diloco_jax.data.samples import Lease
from diloco_jax.island import training
from diloco_jax.island.trainer import Trainer
from diloco_jax.launch import assembly
from diloco_jax.launch.results import RunResult
from diloco_jax.launch.results import collect
from diloco_jax.launch.results import make_folder
from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import syncer_state as s
from diloco_jax.run_config import RunConfig
from diloco_jax.simulation import arrays
from diloco_jax.simulation.checking import Observer
from diloco_jax.simulation.compute import ComputeSettings
from diloco_jax.simulation.network import NetworkSettings
from diloco_jax.simulation.scenario import Scenario
from diloco_jax.simulation.world import World
from diloco_jax.storage import parameters
from diloco_jax.telemetry import machine_lines
from diloco_jax.telemetry import tape as tape_lib
from diloco_jax.telemetry.metrics import IslandMetrics
from diloco_jax.telemetry.metrics import MetricsWriter

STEP_S = 1.0  # of virtual time, where the configuration gives no floor
ROW_EVERY_S = 10.0  # of the syncer's metrics


class _Trainer:
  """One island's inner training, on the step that all islands share."""

  def __init__(self, shared: Trainer, task: Any, fresh: dict[str, Any]):
    self._shared = shared
    self._task = task
    self.extra = fresh
    self._batches: Iterator[Any] = iter(())

  def put(self, params: Any) -> Any:
    return self._shared.put(params)

  def begin(self, start: m.Start) -> None:
    shared = self._shared
    shared.exchange(self.extra)
    shared.index = start.rate_index
    shared.rewarm(start.rewarm_steps)
    self.extra = shared.extra
    samples = start.samples
    lease = Lease(samples.lane, samples.lanes, samples.begin, samples.end)
    self._batches = iter(self._task.batches('train', lease))

  def step(self, params: Any, step: int) -> tuple[Any, int, float | None]:
    del step
    batch = next(self._batches)
    self._shared.exchange(self.extra)
    params, loss = self._shared.step(params, batch)
    self.extra = self._shared.extra
    tokens = training.batch_tokens(self._task, batch)
    return params, tokens, float(loss)


class _Contents(arrays.Contents):
  """The arrays of a run."""

  def __init__(self, planned: assembly.Layout, task: Any):
    run = planned.run
    self._task = task
    self._shared = assembly.make_trainer(run, task)
    start = assembly.start_params(task, run.seed)
    super().__init__(
      planned.partition,
      alpha=run.sync.alpha,
      upload=run.sync.upload,
      download=run.sync.download,
      tx=A.outer_optimizer(
        run.outer.lr, run.outer.momentum, nesterov=run.outer.rule == 'nesterov'
      ),
      rule=run.sync.merge,
      merges=None,
      islands=run.island_count,
      start=lambda: start,
      shardings=self._shared.param_shardings,
    )

  def trainer(self, life: int) -> _Trainer:
    del life
    self._shared.init()
    return _Trainer(self._shared, self._task, self._shared.extra)

  def evaluate(self, params: Any) -> dict[str, float]:
    placed = self._shared.put(params)
    return self._shared.evaluate(placed, self._task.batches('test', None))


class _Folder(Observer):
  """Observes a world and writes the run folder, as the roles would."""

  def __init__(self, workdir: pathlib.Path):
    self._workdir = workdir
    self._now = 0.0
    self._tapes: dict[str, tape_lib.TapeWriter] = {}
    self._digests: dict[str, str] = {}
    self._told_at: dict[str, float] = {}  # by each machine's own clock
    self._islands: dict[str, IslandMetrics] = {}
    self._row_at = 0.0
    self._syncer = MetricsWriter(workdir / 'metrics' / 'syncer.jsonl', None)

  def on_react(
    self,
    world: Any,
    who: str,
    life: int,
    old: Any,
    event: Any,
    new: Any,
    actions: tuple[a.Action, ...],
  ) -> None:
    del life
    self._now = world.kernel.now
    name = who.replace('/', '_')
    if name not in self._tapes:
      self._begin(name, old, new)
    if event is not None:
      digest = machine_lines.chained(self._digests[name], event, actions)
      self._digests[name] = digest
      fields = machine_lines.event_fields(event, actions, digest)
      self._tapes[name].append(tape_lib.EVENT, fields, event.now)
      if isinstance(event, a.StepsFinished):
        self._step(name, event, new)
    now = self._told_at[name] = new.now if event is None else event.now
    for kind, fields in machine_lines.decisions(actions):
      self._tapes[name].append(kind, fields, now)
    if name == machine_lines.SYNCER and self._now >= self._row_at:
      self._row(new)

  def _begin(self, name: str, old: Any, new: Any) -> None:
    path = self._workdir / 'tape' / f'{name}.jsonl'
    writer = self._tapes[name] = tape_lib.TapeWriter(path)
    self._digests[name] = ''
    make = (
      machine_lines.syncer_fields
      if name == machine_lines.SYNCER
      else machine_lines.island_fields
    )
    fields = {'now': new.now, **make(old)}
    writer.append(machine_lines.MACHINE, fields, new.now)

  def _step(self, name: str, event: a.StepsFinished, new: Any) -> None:
    if name not in self._islands:
      path = self._workdir / 'metrics' / f'{name}.jsonl'
      self._islands[name] = IslandMetrics(
        MetricsWriter(path, None),
        new.incarnation,
        lambda: self._now,
        background=False,
      )
    self._islands[name].step(
      step=event.step,
      tokens=event.tokens,
      loss=event.loss,
      exchange_s=0.0,
      step_time_s=event.step_time_s,
      state=new.state,
    )

  def _row(self, state: s.SyncerState) -> None:
    self._row_at = self._now + ROW_EVERY_S
    live = [
      x for k, x in state.islands.items() if k >= 0 and x.status == s.LIVE
    ]
    self._syncer.row(
      t_s=round(self._now, 3),
      global_step=state.global_step,
      merges=state.merges,
      live=len(live),
      participating=sum(x.participating for x in live),
      tokens=sum(x.tokens for x in state.islands.values() if x.id >= 0),
    )

  def close(self, final: dict[str, Any] | None, state: s.SyncerState) -> None:
    self._row(state)
    self._syncer.close()
    for metrics in self._islands.values():
      metrics.close()
    for name, writer in self._tapes.items():
      fields = {'digest': self._digests[name]}
      writer.append(machine_lines.CLOSED, fields, self._told_at[name])
      writer.close()
    if final is not None:
      path = self._workdir / 'metrics' / 'evaluator.jsonl'
      with_row = MetricsWriter(path, None)
      with_row.row(
        t_s=round(self._now, 3),
        global_step=state.global_step,
        eval_loss=final['loss'],
        eval_accuracy=final.get('accuracy'),
        tokens=int(final['tokens']),
        final=True,
      )
      with_row.close()


def scenario_of(planned: assembly.Layout) -> Scenario:
  """A calm world: equal islands, fast links, no faults."""
  floor_s = planned.run.launch.step_floor_ms / 1000
  step_s = floor_s or STEP_S
  return Scenario(
    seed=planned.run.seed,
    settings=planned.settings,
    compute=ComputeSettings(
      step_s=step_s, encode_s=0.01 * step_s, merge_s=0.01 * step_s
    ),
    network=NetworkSettings(latency_s=0.01 * step_s),
  )


def run_in_virtual_time(
  task: Any,
  run: RunConfig,
  workdir: pathlib.Path | None = None,
  *,
  scenario: Scenario | None = None,
  evaluate: bool = True,
) -> RunResult:
  """A whole run in virtual time; see `RunResult`.

  Args:
    task: what is trained, one object for all.
    run: the configuration.
    workdir: of the run folder; None: a temporary one that is removed.
    scenario: how long things take; None: `scenario_of` the configuration. Its
      settings are those of the configuration in any case.
    evaluate: measure the held-out loss of the final Θ.

  Raises:
    RuntimeError: the run has not finished by the scenario's deadline.
  """
  planned = assembly.layout(run, assembly.param_shapes(task, run.seed))
  with tempfile.TemporaryDirectory() as temporary:
    folder = workdir or pathlib.Path(temporary)
    make_folder(planned.run, folder)
    contents = _Contents(planned, task)
    observer = _Folder(folder)
    world = World(
      scenario or scenario_of(planned), (observer,), contents=contents
    )
    world.run_to_end()
    if not world.finished:
      raise RuntimeError(f'the run stands still: {world.syncer.state.phase}')
    store = world.syncer.contents.store
    params = store.parameters(assembly.param_shapes(task, run.seed))
    parameters.save(folder / 'model', params)
    final = contents.evaluate(params) if evaluate else None
    observer.close(final, world.syncer.state)
    return collect(folder, params)
