"""A process for tests to stop, kill or leave alone: one client or server.

Arguments: a role, and for a client the address. It says `up` when it is
connected, then does what is asked on standard input.
"""

import sys

from diloco_jax.transport import base
from tests.transport import ends


def main():
  role, *rest = sys.argv[1:]
  options = base.TransportOptions(keepalive_s=0.5)
  if role == 'server':
    end = ends.Grpc(options).server
    print(end.address, flush=True)
  else:
    end = ends.connect(rest[0], options=options)
  peer = ends.one(end, base.PeerUp).peer
  print('up', flush=True)
  for line in sys.stdin:
    if line == 'bulk\n':
      sends = ends.broadcast() if role == 'server' else ends.contribution()
      assert end.send(peer, sends, ends.payload(64 << 20))
    elif line == 'leave\n':
      # Without closing: no thread may keep the process.
      return


if __name__ == '__main__':
  main()
