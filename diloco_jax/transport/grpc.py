"""The transport between processes: two gRPC streams of raw bytes a peer.

One stream carries control, one bulk, each over a connection of its own, so
that a report never waits behind a gigabyte. No generated code: handlers take
and give frames (see `frames`). Islands open the connections, outbound only.

Threads: a client has one that keeps the connection up and one that reads
each stream; a server has two for each stream of a peer and one that watches
for streams that do not move. gRPC adds two for each stream of a client and
one for a server. None keeps a process from ending.
"""

import random

from diloco_jax.transport import base
from diloco_jax.transport.grpc_client import ClientEndpoint
from diloco_jax.transport.grpc_server import ServerEndpoint


def serve(
  address: str, token: str, options: base.TransportOptions | None = None
) -> ServerEndpoint:
  """Listen at HOST:PORT; port 0 takes any free one (see `.address`).

  Raises:
    UserError: the address cannot be listened on, or a TLS file is missing.
  """
  return ServerEndpoint(address, token, options or base.TransportOptions())


def connect(
  address: str,
  token: str,
  options: base.TransportOptions | None = None,
  *,
  rng: random.Random,
) -> ClientEndpoint:
  """Connect to HOST:PORT, in the background and again when it is lost.

  Args:
    address: of the server.
    token: of the run.
    options: bounds, times and TLS.
    rng: for the jitter of the back-off.

  Raises:
    UserError: a TLS file is missing.
  """
  return ClientEndpoint(address, token, options or base.TransportOptions(), rng)
