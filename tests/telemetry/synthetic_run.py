"""Writes the folder of a small run by hand, with plain JSON.

Two islands, two fragments of 300 and 700 parameters. Steps take a second and
100 tokens. Island 1 is killed at 5.2 s and back, restored at step 5, at 9 s.
"""

import json

PARAMETERS = 1000

CONFIG = {
  'config_hash': 'f00d' * 16,
  'config': {
    'preset': 'decoupled_diloco',
    'islands': 2,
    'steps': 8,
    'metrics': {'reference': 2.25},
    'launch': {'step_floor_ms': 0.0},
    'data': {'path': '<b>&"corpus"</b>'},
  },
}


def line(t_s, kind, **fields):
  return {'t_s': t_s, 'kind': kind, **fields}


def closed(t_s, number, reason, fragment, live, participating, left_out=()):
  return line(
    t_s, 'round_closed', round=[1, number], fragment=fragment, slot=-1,
    reason=reason, members=live, contributed=live - len(left_out),
    left_out=[list(x) for x in left_out], live=live,
    participating=participating, duration_s=0.5, grace_s=0.25,
    global_step=2 * number,
  )  # fmt: skip


def merge(t_s, number, fragment, inputs, steps, drain=False):
  return line(
    t_s, 'merge', round=[1, number], fragment=fragment, slot=-1,
    version=[1, number], parent=[1, number - 1], digest_f32='a', digest='b',
    global_step=2 * number, drain=drain, reason='all_in',
    inputs=[
      [island, incarnation, number, c_steps, c_tokens,
       c_tokens * c_tokens / c_steps]
      for island, incarnation, c_steps, c_tokens in inputs
    ],
    left_out=[], steps=steps,
  )  # fmt: skip


def total(t_s, island, incarnation, alive, steps, trained, merged, lost,
          pending):  # fmt: skip
  return line(
    t_s, 'island_total', island=island, incarnation=incarnation, steps=steps,
    tokens=100 * steps, trained_token_params=trained,
    merged_token_params=merged, lost_token_params=lost,
    pending_token_params=pending, lost_steps=0, alive=alive,
  )  # fmt: skip


def tape():
  return [
    line(
      0.0, 'run_started', config_hash='f00d', islands=2, fragments=2,
      sizes=[300, 700], period=4, stride=2, overlap=1, steps=8, mode='free',
      adopt='rebase', incarnation=1,
    ),
    line(0.5, 'joined', island=0, incarnation=1, entry='fresh'),
    line(0.5, 'joined', island=1, incarnation=1, entry='fresh'),
    line(4.0, 'round_opened', round=[1, 1], fragment=0, slot=-1,
         members=[0, 1]),
    closed(4.4, 1, 'all_in', 0, 2, 2),
    merge(4.5, 1, 0, [(0, 1, 4, 400), (1, 1, 4, 400)], [[0, 4], [1, 4]]),
    line(5.0, 'refused', island=1, incarnation=1, fragment=1, round=[1, 2],
         reason='norm'),
    closed(6.4, 2, 'grace_over', 1, 2, 1, [(1, 'late')]),
    merge(6.5, 2, 1, [(0, 1, 3, 300)], [[0, 6], [1, 5]]),
    line(8.0, 'lapsed', island=1, incarnation=1, silent_s=3.0),
    closed(8.4, 3, 'all_in', 0, 1, 1),
    merge(8.5, 3, 0, [(0, 1, 4, 400)], [[0, 9]]),
    line(9.0, 'joined', island=1, incarnation=2, entry='own_checkpoint'),
    line(9.5, 'refused', island=1, incarnation=2, fragment=0, round=[1, 4],
         reason='non_finite'),
    line(9.6, 'refused', island=1, incarnation=2, fragment=0, round=[1, 4],
         reason='norm'),
    closed(10.0, 4, 'empty', 0, 1, 0, [(0, 'no_steps')]),
    closed(10.4, 5, 'quorum_timeout', 1, 2, 1, [(1, 'lapsed')]),
    merge(10.5, 5, 1, [(0, 1, 3, 300)], [[0, 10], [1, 7]]),
    line(11.9, 'draining', reason='steps', global_step=8),
    closed(12.4, 6, 'all_in', 1, 2, 2),
    merge(12.5, 6, 1, [(0, 1, 6, 600), (1, 2, 2, 200)], [[0, 12], [1, 7]],
          drain=True),
    closed(12.55, 7, 'all_in', 0, 2, 2),
    merge(12.6, 7, 0, [(0, 1, 4, 333), (1, 2, 1, 100)], [[0, 12], [1, 7]],
          drain=True),
    line(12.7, 'left', island=0, incarnation=1, reason='finished'),
    line(12.8, 'left', island=1, incarnation=2, reason='finished'),
    # 0: 1133 * 300 + 1200 * 700 merged.
    total(13.0, 1, 1, False, 5, 500_000, 120_000, 0, 380_000),
    total(13.0, 0, 1, True, 12, 1_200_000, 1_179_900, 20_000, 100),
    total(13.0, 1, 2, True, 7, 200_000, 170_000, 10_000, 20_000),
    line(13.0, 'finished', reason='steps', global_step=8, merges=6,
         params_digest='d1635t'),
  ]  # fmt: skip


def row(t_s, incarnation, step, steps, loss, exchange_s=0.001):
  return {
    't_s': t_s, 'incarnation': incarnation, 'step': step, 'steps': steps,
    'tokens': 100 * step, 'row_tokens': 100 * steps, 'loss': loss,
    'exchange_s': exchange_s, 'step_time_s': 1.0, 'tokens_per_s': 100.0,
    'state': 'training', 'anchors_age_s': 0.5,
  }  # fmt: skip


ISLANDS = {
  0: [row(10.0, 1, 10, 10, 4.0, 0.003), row(12.0, 1, 12, 2, 3.5)],
  1: [row(5.0, 1, 5, 5, 5.0), row(12.0, 2, 7, 2, None)],
}

SYNCER = [
  {'t_s': 4.0, 'global_step': 2, 'merges': 1, 'live': 2, 'participating': 2,
   'committed': 2, 'bytes_up': 100, 'bytes_down': 10, 'period_steps': None},
  {'t_s': 8.0, 'global_step': 6, 'merges': 3, 'live': 1, 'participating': 1,
   'committed': 1, 'bytes_up': 300, 'bytes_down': 20, 'period_steps': 4.5},
  # A new process counts from zero.
  {'t_s': 12.0, 'global_step': 8, 'merges': 6, 'live': 2, 'participating': 2,
   'committed': 2, 'bytes_up': 50, 'bytes_down': 5, 'period_steps': 4.25},
]  # fmt: skip

EVALUATOR = [
  {'t_s': 6.0, 'global_step': 4, 'eval_loss': 3.0, 'eval_accuracy': 0.3,
   'tokens': 900, 'final': False},
  {'t_s': 13.5, 'global_step': 8, 'eval_loss': 2.5, 'eval_accuracy': 0.4,
   'tokens': 900, 'final': True},
]  # fmt: skip


def process(role, index, incarnation, started_s, ended_s, exit_):
  return {
    'role': role, 'index': index, 'incarnation': incarnation, 'pid': 4000,
    'started_s': started_s, 'ended_s': ended_s, 'exit': exit_,
  }  # fmt: skip


PROCESSES = [
  process('syncer', 0, 1, 0.0, 13.6, '0'),
  process('island', 0, 1, 0.1, 13.2, '0'),
  process('island', 1, 1, 0.1, 5.2, 'SIGKILL'),
  process('island', 1, 2, 6.0, 13.2, '0'),
  process('evaluator', 0, None, 0.2, 14.0, '0'),
]

# Worked out by hand from the above.
SUMMARY = {
  'status': 'ok',
  'preset': 'decoupled_diloco',
  'islands': 2,
  'steps': 8,
  'inner_steps_total': 19,  # 10 + 2 + 5 + 2
  'tokens_trained': 1900,
  'tokens_merged': 1469.9,  # (1,179,900 + 120,000 + 170,000) / 1000
  'tokens_lost': 410,  # 20 + 10 overwritten, 380 died with island 1
  'tokens_pending': 20.1,
  'tokens_repeated': None,
  'tokens_overlap_discarded': 30,
  'merges': 6,
  # Island 0: fragment 0 rose by 5, fragment 1 by 4; island 1: by 2.
  'effective_h': 3.25,
  'eval_loss': 2.5,
  'eval_loss_reference': 2.25,
  'eval_accuracy': 0.4,
  'wall_s': 14.0,
  'train_s': 12.0,  # steps finish from 1 s to 12 s, the first began at 0 s
  'tokens_per_s': 1900 / 12,
  'goodput': 19 / 24,
  'global_downtime_s': 0.0,
  'bytes_up': 350,
  'bytes_down': 25,
  'islands_live': 12 / 7,
  'islands_participating': 9 / 7,
  'islands_committed': 1.5,
  'refusals': {'non_finite': 1, 'norm': 2},
  'rounds_closed': {
    'all_in': 4, 'empty': 1, 'grace_over': 1, 'quorum_timeout': 1,
  },
  'faults': [
    {'t_s': 5.2, 'kind': 'death', 'target': 'island_1', 'back_s': 3.8,
     'first_merge_s': 7.3},
  ],
  'params_digest': 'd1635t',
}  # fmt: skip


def write_lines(path, rows, torn=''):
  path.parent.mkdir(parents=True, exist_ok=True)
  text = ''.join(json.dumps(row) + '\n' for row in rows)
  path.write_text(text + torn, encoding='utf-8')


def write_run(
  workdir, tape_lines=None, islands=None, syncer=None, evaluator=None,
  processes=None, config=None, torn='', without=(),
):  # fmt: skip
  """Writes the run above, or with other parts; `without` names files."""
  files = {
    'tape/syncer.jsonl': tape() if tape_lines is None else tape_lines,
    'metrics/syncer.jsonl': SYNCER if syncer is None else syncer,
    'metrics/evaluator.jsonl': EVALUATOR if evaluator is None else evaluator,
  }
  for index, rows in (ISLANDS if islands is None else islands).items():
    files[f'metrics/island_{index}.jsonl'] = rows
  workdir.mkdir(parents=True, exist_ok=True)
  for name, rows in files.items():
    if name not in without:
      write_lines(workdir / name, rows, torn)
  documents = {
    'config.json': CONFIG if config is None else config,
    'processes.json': PROCESSES if processes is None else processes,
  }
  for name, document in documents.items():
    if name not in without:
      (workdir / name).write_text(json.dumps(document), encoding='utf-8')
  return workdir
