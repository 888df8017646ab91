"""Which inner steps are where, told apart from the machines that it watches.

An island's local value of a fragment is told as the spans of steps in local -
anchor, a capture as the spans that it copied, Θ as what each merge added to
it. The machines' own counters are not read; they are compared with these.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.protocol.settings import OVERWRITE
from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation import spans as sp
from diloco_jax.simulation.checking import Moment

SAVES_KEPT = 8


class Given(NamedTuple):
  """What one capture holds."""

  island: int
  incarnation: int
  number: int
  spans: sp.Spans
  base: m.Version
  tokens: int
  step: int


class Made(NamedTuple):
  """One version of a fragment, and what its merge added."""

  fragment: int
  version: m.Version
  digest: str
  shares: tuple[Given, ...] = ()
  undo: Mapping[int, Any] = {}  # island -> its last inclusion before


class Last(NamedTuple):
  """The last merge of a fragment that included one island."""

  version: m.Version
  given: Given


class Local:
  """One start of one island: its steps, and what its values hold."""

  def __init__(self, number: int, fragments: int, step: int, tokens: int):
    self.number = number
    self.life = 0  # as the world counts the starts of processes
    self.index = -1
    self.incarnation = 0
    self.first = step
    self.step = step
    self.tokens = [tokens]  # cumulative, from `first` on
    self.spans: list[sp.Spans] = [()] * fragments  # but for the newest steps
    self.since = [step] * fragments  # own steps after this are pending too
    self.anchor: list[m.Version | None] = [None] * fragments
    self.digest = [''] * fragments  # of the anchors; '' of a checkpoint's
    self.kept: dict[int, Given] = {}  # captures not settled
    self.staging: dict[tuple[int, m.Version], a.Stage] = {}
    self.saving: tuple[Any, ...] | None = None
    self.lost_versions = False  # a version that it held or made was taken back

  def pending(self, fragment: int) -> sp.Spans:
    """The steps in local - anchor."""
    since = self.since[fragment]
    if since == self.step:
      return self.spans[fragment]
    return (*self.spans[fragment], (self.number, since, self.step))

  def advance(self, step: int, tokens: int) -> None:
    while self.step < step:
      self.step += 1
      self.tokens.append(tokens)


class Theta:
  """What is in Θ, along the ancestry of its versions."""

  def __init__(self, sizes: tuple[int, ...]):
    self.sizes = sizes
    count = len(sizes)
    self.chain: list[list[Made]] = [[] for _ in range(count)]
    self.place: list[dict[m.Version, int]] = [{} for _ in range(count)]
    # fragment -> life -> (after, upto, place in the chain)
    self.entered: list[dict[int, list[tuple[int, int, int]]]] = [
      defaultdict(list) for _ in range(count)
    ]
    self.last: list[dict[int, Last]] = [{} for _ in range(count)]
    self.merged: dict[tuple[int, int], int] = defaultdict(int)
    self.merged_total = 0
    self.merges = 0
    self.seeded = False  # durably

  def seed(self, incarnation: int, digests: tuple[str, ...]) -> None:
    first = m.Version(incarnation, 0)
    for p, digest in enumerate(digests):
      self.chain[p] = [Made(p, first, digest)]
      self.place[p] = {first: 0}

  def newest(self, fragment: int) -> m.Version | None:
    chain = self.chain[fragment]
    return chain[-1].version if chain else None

  def add(self, made: Made) -> None:
    p, place = made.fragment, len(self.chain[made.fragment])
    undo = {x.island: self.last[p].get(x.island) for x in made.shares}
    self.chain[p].append(made._replace(undo=undo))
    self.place[p][made.version] = place
    for given in made.shares:
      for life, after, upto in given.spans:
        self.entered[p][life].append((after, upto, place))
      self.last[p][given.island] = Last(made.version, given)
      self._count(given, self.sizes[p])
    self.merges += bool(made.shares)

  def _count(self, given: Given, factor: int) -> None:
    token_params = given.tokens * factor
    self.merged[given.island, given.incarnation] += token_params
    self.merged_total += token_params

  def take_back(self, fragment: int, parent: m.Version) -> set[int]:
    """Forget what was made after a version; the lives whose work is lost."""
    lives = set()
    chain = self.chain[fragment]
    while chain and chain[-1].version != parent:
      made = chain.pop()
      del self.place[fragment][made.version]
      for given in made.shares:
        for life, _, _ in given.spans:
          self.entered[fragment][life].pop()
          lives.add(life)
        self._count(given, -self.sizes[fragment])
      for island, last in made.undo.items():
        if last is None:
          del self.last[fragment][island]
        else:
          self.last[fragment][island] = last
      self.merges -= bool(made.shares)
    return lives

  def inside(
    self, fragment: int, spans: sp.Spans, version: m.Version | None = None
  ) -> sp.Span | None:
    """A part of these spans that is in Θ (at a version), or None."""
    entered = self.entered[fragment]
    until = len(self.chain[fragment])
    if version is not None:
      until = self.place[fragment].get(version, until)
    for life, after, upto in spans:
      for low, high, place in reversed(entered.get(life, ())):
        if place <= until and max(low, after) < min(high, upto):
          return life, max(low, after), min(high, upto)
        if high <= after:
          break
    return None

  def newest_step(self, island: int, incarnation: int) -> int:
    """The newest step of an incarnation that is in Θ; -1: none is."""
    steps = [-1]
    for last in self.last:
      mine = last.get(island)
      if mine is not None and mine.given.incarnation == incarnation:
        steps.append(mine.given.step)
    return max(steps)


class Books:
  """The listener that keeps Theta and every Local."""

  def __init__(self, settings: Settings):
    self.settings = settings
    self.theta = Theta(settings.sizes)
    self.locals: dict[tuple[str, int], Local] = {}
    self.lives: list[Local] = []
    self.given: dict[tuple[int, int, int, int], Given] = {}
    self.saves: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    self.begun_saves: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    self.taping: dict[str, Any] = {}  # key -> line not known to be durable
    self.unsure: list[Made] = []  # ... when its syncer died
    self.cuts: dict[str, tuple[m.Version, ...]] = {}  # ... of recoveries

  # Islands.

  def local(self, at: Moment) -> Local:
    local = self.locals.get((at.who, at.life))
    if local is None:
      local = self._born(at)
    return local

  def _born(self, at: Moment) -> Local:
    old = at.old
    local = Local(
      len(self.lives), self.settings.fragments, old.boundary, old.tokens
    )
    local.life = at.life
    self.lives.append(local)
    self.locals[at.who, at.life] = local
    if old.held[0].anchor is not None:
      step, versions, starts = _saved(old)
      # Two lives may have saved at one step; what was committed is restored,
      # and may be committed without the island having heard of it.
      for save in (*self.begun_saves[at.who], *self.saves[at.who]):
        if save[:3] == (step, versions, starts):
          local.spans, local.anchor = list(save[3]), list(versions)
          local.digest = [x.digest for x in old.held]
    return local

  def island_sees_boundary(self, at: Moment, event: a.Boundary) -> None:
    local = self.locals.get((at.who, at.life)) or self.local(at)
    if event.step != local.step:
      local.advance(event.step, event.tokens)

  def island_gets_welcome(self, at: Moment, message: m.Welcome) -> None:
    del message
    local = self.local(at)
    local.index, local.incarnation = at.new.island, at.new.incarnation

  def island_does_stage(self, at: Moment, action: a.Stage) -> None:
    self.local(at).staging[action.fragment, action.version] = action

  def island_does_step_plan(self, at: Moment, plan: a.StepPlan) -> None:
    if not (plan.adopt or plan.capture or plan.save):
      return
    local = self.local(at)
    for order in plan.adopt:
      self._adopt(local, order)
    for capture in plan.capture:
      self._capture(local, capture)
    if plan.save:
      spans = [local.pending(p) for p in range(self.settings.fragments)]
      local.saving = (*_saved(at.new), spans)
      self._keep(self.begun_saves[at.who], local.saving)

  def island_sees_checkpoint_saved(
    self, at: Moment, event: a.CheckpointSaved
  ) -> None:
    saving = self.local(at).saving
    if event.ok and saving is not None:
      self._keep(self.saves[at.who], saving)

  def _keep(self, saves: list[Any], save: tuple[Any, ...]) -> None:
    saves.append(save)
    del saves[:-SAVES_KEPT]

  def _adopt(self, local: Local, order: a.AdoptOrder) -> None:
    p = order.fragment
    stage = local.staging.pop((p, order.version))
    for key in [x for x in local.staging if x[0] == p and x[1] < order.version]:
      del local.staging[key]
    if stage.mode == OVERWRITE:
      local.spans[p], local.since[p] = (), local.step
    elif stage.capture is not None:
      inside = self.given[
        local.index, stage.capture.incarnation, p, stage.capture.number
      ]
      left = sp.without(local.pending(p), inside.spans)
      local.since[p] = local.step
      if left and left[-1][0] == local.number and left[-1][2] == local.step:
        local.since[p] = left[-1][1]
        left = left[:-1]
      local.spans[p] = left
    self._relabel(local, order, stage.digest)
    local.anchor[p], local.digest[p] = order.version, stage.digest

  def _relabel(self, local: Local, order: a.AdoptOrder, digest: str) -> None:
    """A syncer came back with the same value under a new name."""
    p = order.fragment
    kept = local.kept.get(p)
    if kept is None or kept.base != local.anchor[p]:
      return
    newer = order.version.incarnation > kept.base.incarnation
    if newer and digest == local.digest[p]:
      kept = local.kept[p] = kept._replace(base=order.version)
      self.given[kept.island, kept.incarnation, p, kept.number] = kept

  def _capture(self, local: Local, order: a.CaptureOrder) -> None:
    p = order.fragment
    spans = local.pending(p)
    base = local.anchor[p]
    assert base is not None
    given = Given(
      local.index, order.capture.incarnation, order.capture.number, spans,
      base, self.tokens(spans), local.step,
    )  # fmt: skip
    local.kept[p] = given
    self.given[given.island, given.incarnation, p, given.number] = given

  def island_does_drop_capture(self, at: Moment, action: a.DropCapture) -> None:
    kept = self.local(at).kept
    mine = kept.get(action.fragment)
    if mine is not None and mine.number == action.capture.number:
      del kept[action.fragment]

  def tokens(self, spans: sp.Spans) -> int:
    total = 0
    for life, after, upto in spans:
      local = self.lives[life]
      total += local.tokens[upto - local.first]
      total -= local.tokens[after - local.first]
    return total

  # The syncer.

  def syncer_starts(self, at: Moment) -> None:
    del at
    lines = self.taping.values()
    self.unsure += [x['made'] for x in lines if 'made' in x]
    self.taping = {}

  def syncer_does_write_tape(self, at: Moment, line: a.WriteTape) -> None:
    del at
    kind = line.key.partition(':')[0]
    if kind not in ('merge', 'seeded', 'recovered'):
      return
    fields = dict(line.fields)
    if kind == 'merge':
      fields['made'] = self._made(fields)
    elif kind == 'seeded':
      if not self.theta.seeded:
        self.theta.seed(fields['incarnation'], fields['digests'])
    else:
      self.cuts[line.key] = fields['parents']
    self.taping[line.key] = fields

  def _made(self, fields: Mapping[str, Any]) -> Made:
    p = fields['fragment']
    shares = tuple(
      self.given[island, incarnation, p, number]
      for island, incarnation, number, *_ in fields['inputs']
      if (island, incarnation, p, number) in self.given
    )
    return Made(p, fields['version'], fields['digest'], shares)

  def syncer_sees_tape_written(self, at: Moment, event: a.TapeWritten) -> None:
    del at
    fields = self.taping.pop(event.key, None)
    if fields is None:
      return
    kind = event.key.partition(':')[0]
    if kind == 'merge':
      self.theta.add(fields['made'])
    elif kind == 'seeded':
      self.theta.seeded = True
    else:
      self.theta.seeded = True
      self._take_back(fields)

  def known(self, fragment: int, version: m.Version) -> m.Version:
    """The version of Θ's chain that has this value.

    The line of a recovery that was cut short may be on the tape all the same,
    and the next recovery may go back to what it took back.
    """
    cut = self.cuts.get(f'recovered:{version.incarnation}')
    if version in self.theta.place[fragment] or cut is None:
      return version
    return self.known(fragment, cut[fragment])

  def _take_back(self, fields: Mapping[str, Any]) -> None:
    parents = [self.known(p, x) for p, x in enumerate(fields['parents'])]
    for made in self.unsure:  # its line was there, and a snapshot has it
      if made.version == parents[made.fragment]:
        self.theta.add(made)
    self.cuts, self.unsure = {}, []
    for p, parent in enumerate(parents):
      for life in self.theta.take_back(p, parent):
        self.lives[life].lost_versions = True
      version = m.Version(fields['incarnation'], parent.merges)
      self.theta.add(Made(p, version, fields['digests'][p]))


def _saved(state: Any) -> tuple[int, tuple[Any, ...], tuple[int, ...]]:
  """How a checkpoint is known again by what is restored from it."""
  return (
    state.boundary,
    tuple(x.anchor for x in state.held),
    tuple(x.step0 for x in state.held),
  )
