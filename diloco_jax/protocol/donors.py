"""A newcomer's inner state from a healthy peer (section 5.10).

The syncer relays it. A donor that does not answer, leaves or is no longer
live is replaced; after `donors_max` of them the newcomer starts without.
"""

from diloco_jax.protocol import messages as m
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.turn import Turn


def may_donate(turn: Turn, island: s.Island) -> bool:
  """Healthy, and its moments are worth having: not a newcomer itself."""
  made = island.step - island.first_step
  ripe = max(turn.settings.period, turn.settings.rewarm_steps)
  return (
    island.status == s.LIVE
    and bool(island.peer)
    and island.healthy
    and island.has_inner_state
    and island.offences == 0
    and made >= ripe
  )


def candidates(turn: Turn, asked: tuple[int, ...] = ()) -> list[s.Island]:
  """Islands that may donate and were not asked yet, the best one first."""
  able = [x for x in turn.live() if x.id not in asked and may_donate(turn, x)]
  return sorted(able, key=lambda x: (-x.step, x.id))


def attend(turn: Turn, index: int) -> None:
  """Ask the next donor if the last one is late, gone or not fit."""
  newcomer = turn.islands[index]
  if newcomer.entry != m.PEER_STATE or newcomer.has_inner_state:
    return
  if newcomer.status != s.ENTERING:
    return
  if newcomer.donors:
    donor = turn.islands.get(newcomer.donors[-1])
    late = turn.now - newcomer.donor_asked_at > turn.limits.donation_s
    if donor is not None and may_donate(turn, donor) and not late:
      return
  able = candidates(turn, newcomer.donors)
  if not able or len(newcomer.donors) >= turn.limits.donors_max:
    turn.island(index, entry=m.PARAMETERS_ONLY)
    turn.note(
      'no_donor', island=index, incarnation=newcomer.incarnation,
      asked=newcomer.donors,
    )  # fmt: skip
    return
  donor = able[0]
  turn.island(
    index, donors=(*newcomer.donors, donor.id), donor_asked_at=turn.now
  )
  turn.note(
    'donor_asked', island=index, incarnation=newcomer.incarnation,
    donor=donor.id,
  )  # fmt: skip
  turn.send(
    donor.peer,
    m.AskDonation(
      island=donor.id,
      incarnation=donor.incarnation,
      recipient=index,
      recipient_incarnation=newcomer.incarnation,
    ),
  )


def on_donation(turn: Turn, donation: m.Donation) -> None:
  """Pass it on, if it is the one that is waited for."""
  newcomer = turn.islands.get(donation.recipient)
  donor = turn.islands.get(donation.island)
  wanted = (
    newcomer is not None
    and donor is not None
    and newcomer.incarnation == donation.recipient_incarnation
    and donor.incarnation == donation.incarnation
    and newcomer.status == s.ENTERING
    and newcomer.entry == m.PEER_STATE
    and not newcomer.has_inner_state
    and newcomer.donors[-1:] == (donor.id,)
  )
  if wanted and newcomer is not None:
    turn.send(newcomer.peer, donation, priority=1)
    turn.note(
      'donated', island=newcomer.id, incarnation=newcomer.incarnation,
      donor=donation.island, donor_step=donation.step,
    )  # fmt: skip
  turn.release(donation.payload)
