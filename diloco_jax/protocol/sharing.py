"""What an island gives to others: its anchors, and its inner state.

Anchors go to a syncer that came back (section 5.9), the inner state to a
newcomer (section 5.10).
"""

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import island_state as i
from diloco_jax.protocol import messages as m
from diloco_jax.protocol.island_turn import Turn


def on_ask_anchors(turn: Turn, message: m.AskAnchors) -> None:
  """Answer, and from then on hear nothing of an older syncer.

  What an older one sent and is not adopted yet is dropped: it may be lost.
  """
  state = turn.get()
  if message.syncer_incarnation > state.syncer_incarnation:
    turn.set(syncer_incarnation=message.syncer_incarnation)
    for p, held in enumerate(turn.held):
      if held.incoming is not None:
        turn.release(held.incoming.handle)
      turn.held[p] = held._replace(incoming=None, pull=None)
  complete = all(x.anchor is not None for x in turn.held)
  turn.send(
    m.Anchors(
      island=state.island,
      incarnation=state.incarnation,
      syncer_incarnation=message.syncer_incarnation,
      versions=tuple(
        x.anchor for x in turn.held if complete and x.anchor is not None
      ),
      digests=tuple(x.digest for x in turn.held if complete),
      step=state.step,
      tokens=state.step_tokens,
      training=state.phase == i.TRAINING,
    )
  )


def on_ask_anchor(turn: Turn, message: m.AskAnchor) -> None:
  if not 0 <= message.fragment < len(turn.held):
    return
  if turn.held[message.fragment].anchor == message.version:
    turn.act(a.GiveAnchor(message.fragment, message.version))


def on_ask_donation(turn: Turn, message: m.AskDonation) -> None:
  """Answered at the next boundary, from one consistent state."""
  state = turn.get()
  if state.phase == i.TRAINING and state.healthy and not state.donating:
    turn.set(donation=message)


def take_donation(turn: Turn) -> bool:
  """Whether the inner state is copied at this boundary."""
  state = turn.get()
  if state.donation is None or state.donating:
    return False
  turn.set(donating=True)
  return True


def on_donation(turn: Turn, message: m.Donation) -> None:
  """An inner state for us; useless once training has begun."""
  if turn.get().phase == i.JOINING and not turn.get().has_inner_state:
    turn.act(a.TakeDonation(digest=message.digest, handle=message.payload))
  turn.release(message.payload)


def on_ready(
  turn: Turn, event: a.AnchorReady | a.Donated | a.DonationTaken
) -> None:
  """The driver has encoded or put in place what was asked for."""
  match event:
    case a.AnchorReady():
      _send_anchor(turn, event)
    case a.Donated():
      _send_donation(turn, event)
    case a.DonationTaken():
      turn.note('donation_taken', ok=event.ok)
      turn.set(has_inner_state=event.ok)
      turn.report()


def _send_anchor(turn: Turn, event: a.AnchorReady) -> None:
  state = turn.get()
  held = turn.held[event.fragment]
  if held.anchor == event.version:
    turn.send(
      m.AnchorValue(
        island=state.island,
        incarnation=state.incarnation,
        syncer_incarnation=state.syncer_incarnation,
        fragment=event.fragment,
        version=event.version,
        digest=held.digest,
        payload=event.handle,
      )
    )
  turn.release(event.handle)


def _send_donation(turn: Turn, event: a.Donated) -> None:
  state = turn.get()
  asked = state.donation
  turn.set(donation=None, donating=False)
  if asked is not None:
    turn.send(
      m.Donation(
        island=state.island,
        incarnation=state.incarnation,
        recipient=asked.recipient,
        recipient_incarnation=asked.recipient_incarnation,
        step=event.step,
        rate_index=event.step,
        versions=tuple(x.anchor for x in turn.held if x.anchor is not None),
        digest=event.digest,
        payload=event.handle,
      ),
      priority=1,
    )
  turn.release(event.handle)
