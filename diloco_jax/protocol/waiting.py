"""Lock step: what an island is told that waits for a slot (section 5.12)."""

from diloco_jax.protocol import messages as m
from diloco_jax.protocol import rounds
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import EACH
from diloco_jax.protocol.turn import Turn


def answer(turn: Turn, index: int, report: m.Report) -> None:
  """Tell an island that the slot it waits for will not come."""
  island = turn.islands[index]
  if island.status == s.ENTERING:
    _tell_lapsed(turn, island, report)
  if report.state != m.WAITING or report.slot < 0:
    return
  if rounds.slot_is_due(turn, island, report.slot):
    return
  # A slot that made a version ends the wait by that version, which is re-sent
  # until it is reported; a skipped slot needs a word, and so does one whose
  # version the island held before it captured the slot.
  fragment = report.slot % len(turn.fragments)
  piece = turn.fragments[fragment]
  newest = piece.slot
  if turn.settings.mode == EACH:
    own = piece.included.get(index)
    fits = own is not None and own.incarnation == island.incarnation
    newest = own.slot if fits and own is not None else -1
  held = report.versions[fragment] if report.versions else None
  has_it = held is not None and held >= turn.wanted(island, fragment)
  if newest < report.slot or has_it:
    turn.send(
      island.peer,
      m.Closed(island=index, incarnation=island.incarnation, slot=report.slot),
    )


def _tell_lapsed(turn: Turn, island: s.Island, report: m.Report) -> None:
  """An island that waits in lock step may wait for what nobody will give.

  It is let in again when it holds every fragment, but holds back those of
  later slots until it comes to their steps.
  """
  if report.state == m.WAITING:
    told = island.id, island.incarnation, island.starts
    turn.send(island.peer, m.Lapsed(*told))
