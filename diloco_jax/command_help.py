"""What --help says."""

LATER_VERBS = ('goodput', 'plan', 'evaluator')

HELP = f"""\
Train one model on many islands of accelerators that fail, stall, differ in
speed and sit far apart (Decoupled DiLoCo and its family, in JAX).

  python -m diloco_jax VERB --config=FILE --workdir=DIR [--config.KEY=VALUE ...]

Verbs:
  train      train a model on several islands, on this machine
  syncer     only the syncer of a run, that islands join from anywhere
  island     one island: joins the run of a syncer (island --help)
  report     summary.json and report.html again, from --workdir=DIR
  simulate   the protocol in virtual time, under faults, with checkers
  replay     the tapes of a run, through the machines that wrote them
  not in this version: {', '.join(LATER_VERBS)}

Example:
  python -m diloco_jax train --config=experiments/configs/quickstart.py \\
    --workdir=runs/quickstart

  python -m diloco_jax train --help     flags of train

Exit codes: 0 fine, 2 a mistake in flags or configuration (one line for each),
130 interrupted.
"""

TRAIN_HELP = """\
Train a model on several islands, each its own JAX program, and a syncer that
merges fragments of their parameters. Islands may die, stall and come back.

  python -m diloco_jax train --config=FILE --workdir=DIR [--config.KEY=VALUE ...]

Example:
  python -m diloco_jax train --config=experiments/configs/quickstart.py \\
    --workdir=runs/quickstart

Flags:
  --config=FILE        a Python file with get_config(); see experiments/configs/
  --workdir=DIR        a new folder; gets summary.json, report.html, metrics/,
                       tape/, model/ and config.json
  --async_mode=false   short for --config.preset=diloco: islands wait for each
                       merge; sync and outer settings of the file do not count
  --config.KEY=VALUE   any setting. Those used most, with their defaults:
    preset=decoupled_diloco   data_parallel, diloco, streaming_diloco
    islands=4                 M
    steps=600                 global steps
    seed=0
    data.path=                text file, folder or JSONL; empty: the standard
                              library's own source
    data.batch=8              sequences a step, per island
    inner.lr=0.006            peak learning rate of the inner optimizer
    outer.lr, outer.momentum  left to the preset
    sync.period               H, inner steps between syncs of a fragment
    sync.fragments            P, divides H
    sync.overlap              tau, inner steps from capture to adoption
    sync.quorum               K, islands that close a round; 0: all live ones
    sync.adopt                overwrite, blend, rebase
    launch.runtime=processes  threads: all islands in one process
Every setting, with its unit: diloco_jax/config.py

Exit codes: 0 fine, 2 a mistake in flags or configuration (one line for each),
130 interrupted by Ctrl-C (the run is closed cleanly).
"""

ISLAND_HELP = """\
Join the run of a syncer as one more island, train to its end, leave.

  python -m diloco_jax island --syncer=HOST:PORT --token_file=FILE \\
    [--index=N] [--workdir=DIR] [--config.KEY=VALUE ...]

Flags:
  --syncer=HOST:PORT   the syncer's address
  --token_file=FILE    DIR/token of the run
  --index=N            wanted island index; by default any free one
  --workdir=DIR        for this island's tape and metrics; by default none
  --config.KEY=VALUE   settings of this island: data.path, data.batch, mesh.*,
                       launch.*. Everything else comes from the syncer; one
                       that is given all the same must be as the run has it

Exit codes: 0 fine, 2 a mistake (one line for each).
"""

SIMULATE_HELP = """\
Run the protocol's machines in virtual time, seed after seed. A seed draws the
whole run: islands, fragments, speeds, links, disks and faults. Checkers look
at every event.

  python -m diloco_jax simulate --seeds=A:B [--mode=timing|numeric] [--jobs=N]
  python -m diloco_jax simulate --scenario=FILE

Flags:
  --seeds=A:B          seeds A, A+1, ..., B-1
  --mode=timing        handles stand for arrays (fast); numeric: real arrays,
                       merges and codecs on a toy model
  --jobs=N             processes; by default one for each core
  --scenario=FILE      one run, as a failure has printed it

Exit codes: 0 fine; 127 a crash, 128 a run stood still, 129 a checker found
something wrong; 1 with 2000 seeds or more, some fault or reason has never
occurred; 2 a mistake in the flags.
"""

REPLAY_HELP = """\
Feed the tapes of a run through the machines that wrote them, and compare
every action.

  python -m diloco_jax replay --workdir=DIR

Exit codes: 0 the same, 1 a difference (file, line, got, expected), 2 a mistake
in the flags or a folder without tapes.
"""

TEXTS = {
  'train': TRAIN_HELP,
  'syncer': TRAIN_HELP,
  'island': ISLAND_HELP,
  'simulate': SIMULATE_HELP,
  'replay': REPLAY_HELP,
}
