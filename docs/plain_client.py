"""Go on with a prompt of token ids: python plain_client.py ADDRESS ID [ID ...]

Needs pyzmq and msgpack, and nothing of Brigade. The tokens are printed one a line, as they come; docs/protocol.md explains.
"""

import struct
import sys

import msgpack
import zmq

VERSION = 1
ATTACH, ADD_REQUEST, MODEL_INFO, REQUEST_OUTPUT, REQUEST_FAILED = 32, 33, 48, 49, 50


def send(socket, tag, head, *buffers):
    socket.send_multipart([bytes([VERSION]), bytes([tag]), msgpack.packb(head), *buffers])


def receive(socket, timeout_s=60):
    if not socket.poll(1000 * timeout_s):
        sys.exit(f"the engine said nothing for {timeout_s} s")
    _, tag, head, *_ = socket.recv_multipart()
    return tag[0], msgpack.unpackb(head)


def column(data):
    """A list of integers, as the engine packs it."""
    if not data:
        return []
    if data[0] == 0:  # all values are the same: the value, and how many
        value, count = struct.unpack("<iI", data[1:])
        return [value] * count
    return [value for (value,) in struct.iter_unpack({1: "<B", 2: "<H", 4: "<i"}[data[0]], data[1:])]


def main(address, prompt):
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    send(socket, ATTACH, ["plain_client"])
    tag, info = receive(socket)
    assert tag == MODEL_INFO
    print(f"{info[2]}: {info[3]} stages, {info[4]} tokens in its vocabulary", file=sys.stderr)
    params = {"max_tokens": 16, "temperature": 0.0}
    send(socket, ADD_REQUEST, ["request 1", len(prompt), params], struct.pack(f"<{len(prompt)}i", *prompt))
    while True:
        tag, head = receive(socket)
        if tag == REQUEST_FAILED:
            sys.exit(f"{head[2]}: {head[3]}")
        if tag == REQUEST_OUTPUT:
            for token_id in column(head[2]):
                print(token_id, flush=True)
            if head[3] is not None:
                print(f"ended by {head[3]}", file=sys.stderr)
                return


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]])
