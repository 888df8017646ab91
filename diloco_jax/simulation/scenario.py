"""What one simulated run is: settings, physics and a plan of faults."""

import dataclasses

from diloco_jax.chaos import plan
from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation import liveness
from diloco_jax.simulation.compute import ComputeSettings
from diloco_jax.simulation.network import NetworkSettings
from diloco_jax.simulation.storage import DiskSettings

# What the last fault has left behind is over after this: messages in flight,
# connections that are not noticed to be gone, processes that come back.
QUIET_S = 30.0


@dataclasses.dataclass(frozen=True)
class Scenario:
  """A value: the same scenario is the same run, event for event."""

  seed: int
  settings: Settings
  compute: ComputeSettings = dataclasses.field(default_factory=ComputeSettings)
  network: NetworkSettings = dataclasses.field(default_factory=NetworkSettings)
  disk: DiskSettings = dataclasses.field(default_factory=DiskSettings)
  faults: tuple[plan.Fault, ...] = ()
  jitter: bool = False  # delays are uniform up to twice their mean
  clocks_differ_s: float = 0.0  # machines' clocks, at most, at their start
  has_task: bool = True  # the syncer makes Θ(0) itself

  @property
  def healed_s(self) -> float:
    """From then on nothing goes wrong any more."""
    return plan.ends_at(self.faults) + QUIET_S if self.faults else 0.0

  @property
  def bound_s(self) -> float:
    """At most this long without a merge of a fragment, after healing."""
    net, compute, disk = self.network, self.compute, self.disk
    transfer_s = net.latency_s * 2
    if net.bandwidth:
      transfer_s += 2 * sum(self.settings.sizes) / net.bandwidth
    exchange_s = (
      10 * transfer_s
      + 2 * (compute.encode_s + 2 * compute.stage_s + compute.merge_s)
      + 4 * (disk.tape_s + disk.snapshot_s)
      + net.keepalive_s + net.notice_s + net.retry_s
    )  # fmt: skip
    return liveness.bound_s(
      self.settings, step_s=2 * self.compute.slowest_s, exchange_s=exchange_s
    )

  @property
  def deadline_s(self) -> float:
    """By then the run has finished, or is stuck."""
    steps_s = self.settings.steps * self.compute.slowest_s
    return self.healed_s + 12 * steps_s + 4 * self.bound_s
