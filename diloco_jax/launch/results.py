"""What a run in this process leaves behind, and the folder it leaves it in."""

import json
import pathlib
import time
from typing import Any, NamedTuple

from diloco_jax import config_json
from diloco_jax.launch import role
from diloco_jax.run_config import RunConfig
from diloco_jax.telemetry import folder as folder_lib
from diloco_jax.telemetry import summary as summary_lib
from diloco_jax.telemetry.tape import read_tape


class RunResult(NamedTuple):
  """What a run in this process leaves behind."""

  summary: dict[str, Any]  # as in summary.json
  params: Any  # final Θ, NumPy f32
  history: dict[str, list[dict[str, Any]]]  # metrics rows by participant
  tape: list[dict[str, Any]]  # the syncer's decisions


def make_folder(run: RunConfig, workdir: pathlib.Path) -> None:
  """The files that a run needs before it starts."""
  for name in ('tape', 'metrics'):
    (workdir / name).mkdir(parents=True, exist_ok=True)
  config_json.save(run, workdir)
  (workdir / role.START_FILE).write_text(
    json.dumps({'wall_s': time.time()}), encoding='utf-8'
  )


def collect(folder: pathlib.Path, params: Any) -> RunResult:
  """The result of a finished run, its summary.json among it."""
  summary = summary_lib.summarize(folder, 'ok')
  summary_lib.write_summary(folder, summary)
  return RunResult(
    summary=summary,
    params=params,
    history=_history(folder),
    tape=read_tape(folder / 'tape' / 'syncer.jsonl', events=False),
  )


def _history(folder: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
  return {
    path.stem: folder_lib.read_rows(path)
    for path in sorted((folder / 'metrics').glob('*.jsonl'))
  }
