"""How fast payloads travel between two processes on loopback.

Raw TCP (one socket, into a large NumPy buffer that is used again) is the
yardstick; ours is measured with its checksums, and with TLS where asked for.
The ways take turns, so that all of them see the same machine. A time goes from
before the send to the acknowledgement of the receiver, which holds the whole
payload by then. Aim: 0.4 of raw TCP at 64 and 256 MiB, 0.3 at 16 MiB.

Ours needs three to four times the CPU of raw TCP and both cores of a small
machine at once, so the ratio falls as soon as others compute. Each round of
the ways tells how many cores others used meanwhile (on Linux), and the ratio
over the quiet rounds is given beside the one over all.

python experiments/bench/transport.py [--sizes=16,64,256] [--tls] [--smoke]
"""

import argparse
from collections.abc import Callable
import datetime
import ipaddress
import json
import os
import pathlib
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import grpc as grpc_library
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from diloco_jax.protocol import messages as m  # noqa: E402
from diloco_jax.transport import base  # noqa: E402
from diloco_jax.transport import grpc  # noqa: E402

TOKEN = 'bench'
MIB = 1 << 20
AIMS = {16: 0.3, 64: 0.4, 256: 0.4}  # of raw TCP, by MiB
RESULTS = pathlib.Path(__file__).parent / 'results' / 'transport.jsonl'
TIMEOUT_S = 300.0
TCP, OURS, TLS = 'tcp', 'ours', 'ours_tls'
QUIET = 0.5  # cores that others use, at most
STAT = pathlib.Path('/proc/stat')


def busy_s() -> float:
  """CPU seconds of the whole machine; 0 where it does not tell."""
  if not STAT.exists():
    return 0.0
  ticks = [int(x) for x in STAT.read_text().split('\n')[0].split()[1:9]]
  idle = ticks[3] + ticks[4]
  return (sum(ticks) - idle) / os.sysconf('SC_CLK_TCK')


# The receiving process.


def receive_raw(listening: socket.socket) -> None:
  connection, _ = listening.accept()
  connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  buffer = np.empty(0, np.uint8)
  while header := connection.recv(8, socket.MSG_WAITALL):
    size = int.from_bytes(header, 'little')
    if len(buffer) != size:
      buffer = np.empty(size, np.uint8)
    view = memoryview(buffer)
    while len(view):
      view = view[connection.recv_into(view) :]
    connection.sendall(b'\1')


def receive_ours(endpoint: base.Endpoint) -> None:
  while True:
    for item in endpoint.receive(None):
      if isinstance(item, base.Delivery):
        endpoint.send(item.peer, m.Closed(island=0, incarnation=0, slot=0))
      elif isinstance(item, base.PeerDown):
        return


def receiver(options: dict[str, dict[str, object]]) -> None:
  """Tells its addresses, then its CPU seconds for each line it reads."""
  listening = socket.create_server(('127.0.0.1', 0))
  addresses = {TCP: f'127.0.0.1:{listening.getsockname()[1]}'}
  threads = [threading.Thread(target=receive_raw, args=(listening,))]
  endpoints = []
  for way, given in options.items():
    endpoint = grpc.serve('127.0.0.1:0', TOKEN, base.TransportOptions(**given))
    addresses[way] = endpoint.address
    endpoints.append(endpoint)
    threads.append(threading.Thread(target=receive_ours, args=(endpoint,)))
  for thread in threads:
    thread.start()
  print(json.dumps(addresses), flush=True)
  for _ in sys.stdin:
    print(json.dumps(time.process_time()), flush=True)
  for thread in threads:
    thread.join()
  for endpoint in endpoints:
    endpoint.close()
  listening.close()


# The sending process.


class Raw:
  """One socket."""

  def __init__(self, address: str):
    host, port = address.split(':')
    self._socket = socket.create_connection((host, int(port)))
    self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

  def __call__(self, data: np.ndarray) -> None:
    self._socket.sendall(len(data).to_bytes(8, 'little'))
    self._socket.sendall(data)
    if self._socket.recv(1) != b'\1':
      raise RuntimeError('the receiver is gone')

  def close(self) -> None:
    self._socket.close()


class Ours:
  """The transport."""

  def __init__(self, address: str, options: base.TransportOptions):
    self._endpoint = grpc.connect(address, TOKEN, options, rng=random.Random(0))
    if not self._endpoint.receive(TIMEOUT_S):
      raise RuntimeError('no connection')

  def __call__(self, data: np.ndarray) -> None:
    message = m.Contribution(
      island=0,
      incarnation=0,
      round=m.RoundId(0, 0),
      fragment=0,
      capture=m.CaptureId(0, 0),
      base=m.Version(0, 0),
      c_steps=1,
      c_tokens=1,
      held_s=0.0,
      encode_s=0.0,
      fingerprint='',
    )
    payload = base.Payload('f32', (data,))
    if not self._endpoint.send(base.SYNCER, message, payload):
      raise RuntimeError('not sent')
    items = self._endpoint.receive(TIMEOUT_S)
    if not items or not isinstance(items[0], base.Delivery):
      raise RuntimeError(f'not acknowledged: {items}')

  def close(self) -> None:
    self._endpoint.close()


def certificate(folder: pathlib.Path) -> tuple[str, str]:
  """Paths of a self-signed certificate for loopback and of its key."""
  from cryptography import x509
  from cryptography.hazmat.primitives import hashes
  from cryptography.hazmat.primitives import serialization
  from cryptography.hazmat.primitives.asymmetric import ec

  key = ec.generate_private_key(ec.SECP256R1())
  name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, 'bench')])
  now = datetime.datetime.now(datetime.UTC)
  day = datetime.timedelta(days=1)
  loopback = x509.IPAddress(ipaddress.ip_address('127.0.0.1'))
  made = (
    x509.CertificateBuilder()
    .subject_name(name)
    .issuer_name(name)
    .public_key(key.public_key())
    .serial_number(x509.random_serial_number())
    .not_valid_before(now - day)
    .not_valid_after(now + day)
    .add_extension(x509.BasicConstraints(True, None), True)
    .add_extension(x509.SubjectAlternativeName([loopback]), False)
    .sign(key, hashes.SHA256())
  )
  cert_path, key_path = folder / 'cert.pem', folder / 'key.pem'
  cert_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
  key_path.write_bytes(
    key.private_bytes(
      serialization.Encoding.PEM,
      serialization.PrivateFormat.PKCS8,
      serialization.NoEncryption(),
    )
  )
  return str(cert_path), str(key_path)


def measure(
  ways: dict[str, Callable[[np.ndarray], None]],
  sizes: list[int],
  repeats: int,
  cpu_there: Callable[[], float],
) -> list[dict[str, object]]:
  """One record for each transfer; the first of a size is not among them."""
  records: list[dict[str, object]] = []
  for size in sizes:
    data = np.random.default_rng(0).integers(0, 256, size * MIB, np.uint8)
    for repeat in range(-1, repeats):
      busy, start, of_round = busy_s(), time.perf_counter(), []
      for way, send in ways.items():
        cpu = time.process_time() + cpu_there()
        began = time.perf_counter()
        send(data)
        seconds = time.perf_counter() - began
        cpu = time.process_time() + cpu_there() - cpu
        of_round.append(
          {
            'way': way,
            'mib': size,
            'repeat': repeat,
            'seconds': seconds,
            'cpu_seconds': cpu,
          }
        )
      ours = sum(x['cpu_seconds'] for x in of_round)
      others = (busy_s() - busy - ours) / (time.perf_counter() - start)
      if repeat >= 0:
        records += [{**x, 'others_cores': others} for x in of_round]
  return records


def summarize(records: list[dict[str, object]]) -> list[dict[str, object]]:
  """For each size and way, over the repeats: median, and range of the ratio."""
  rows = []
  for size in sorted({r['mib'] for r in records}):
    of_size = [r for r in records if r['mib'] == size]
    tcp = [r['seconds'] for r in of_size if r['way'] == TCP]
    for way in dict.fromkeys(r['way'] for r in of_size):
      of_way = [r for r in of_size if r['way'] == way]
      ratios = [t / r['seconds'] for t, r in zip(tcp, of_way, strict=True)]
      quiet = [
        ratio
        for ratio, r in zip(ratios, of_way, strict=True)
        if r['others_cores'] <= QUIET
      ]
      gib = size / 1024
      rows.append(
        {
          'mib': size,
          'way': way,
          'gib_s': gib / statistics.median(r['seconds'] for r in of_way),
          'cpu_s_gib': statistics.median(r['cpu_seconds'] for r in of_way)
          / gib,
          'ratio': statistics.median(ratios),
          'ratio_min': min(ratios),
          'ratio_max': max(ratios),
          'ratio_quiet': statistics.median(quiet) if quiet else None,
          'rounds_quiet': len(quiet),
        }
      )
  return rows


def print_table(rows: list[dict[str, object]]) -> None:
  print(
    '   MiB  way       GiB/s  CPU-s/GiB  of raw TCP (range)    in quiet rounds'
    '   aim'
  )
  for row in rows:
    aim = AIMS.get(row['mib']) if row['way'] == OURS else None
    told = '' if aim is None else f'{aim:g}'
    quiet = row['ratio_quiet']
    quietly = '   -' if quiet is None else f'{quiet:.2f}'
    print(
      f'{row["mib"]:6g}  {row["way"]:<8}  {row["gib_s"]:5.2f}'
      f'  {row["cpu_s_gib"]:9.2f}  {row["ratio"]:.2f}'
      f' ({row["ratio_min"]:.2f}-{row["ratio_max"]:.2f})'
      f'      {quietly} of {row["rounds_quiet"]:3}       {told}'
    )


def run(args: argparse.Namespace, folder: pathlib.Path) -> None:
  given: dict[str, dict[str, object]] = {OURS: {}}
  client_options = {OURS: base.TransportOptions()}
  if args.tls:
    cert, key = certificate(folder)
    given[TLS] = {'tls_cert': cert, 'tls_key': key}
    client_options[TLS] = base.TransportOptions(tls_ca=cert)
  child = subprocess.Popen(
    [sys.executable, __file__, '--receiver', json.dumps(given)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  with child:

    def cpu_there() -> float:
      child.stdin.write('\n')
      child.stdin.flush()
      return float(child.stdout.readline())

    addresses = json.loads(child.stdout.readline())
    ways = {TCP: Raw(addresses[TCP])}
    for way, options in client_options.items():
      ways[way] = Ours(addresses[way], options)
    records = measure(ways, args.sizes, args.repeats, cpu_there)
    for way in ways.values():
      way.close()
    child.stdin.close()
  rows = summarize(records)
  print_table(rows)
  load = os.getloadavg()[0]
  if load > (os.cpu_count() or 1):
    print(f'load {load:.1f}: others compete for the cores, which distorts the')
    print('ratios both ways; of these figures only CPU-s/GiB says much')
  if args.out:
    out = {
      'when': datetime.datetime.now(datetime.UTC).isoformat('T', 'seconds'),
      'cores': os.cpu_count(),
      'load': load,
      'python': platform.python_version(),
      'grpc': grpc_library.__version__,
      'summary': rows,
      'transfers': records,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open('a', encoding='utf-8') as file:
      file.write(json.dumps(out) + '\n')


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--sizes',
    type=lambda text: [int(x) for x in text.split(',')],
    default=[16, 64, 256],
    help='MiB, with commas between',
  )
  parser.add_argument('--repeats', type=int, default=11)
  parser.add_argument('--tls', action='store_true', help='TLS beside it')
  parser.add_argument('--out', type=pathlib.Path, default=RESULTS)
  parser.add_argument(
    '--smoke', action='store_true', help='one small transfer; no results kept'
  )
  parser.add_argument('--receiver', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.receiver:
    receiver(json.loads(args.receiver))
    return
  if args.smoke:
    args.sizes, args.repeats, args.out, args.tls = [1], 1, None, True
  with tempfile.TemporaryDirectory() as folder:
    run(args, pathlib.Path(folder))


if __name__ == '__main__':
  main()
