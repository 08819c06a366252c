"""The `ClientApp`: every kind of message goes to the node's one function."""

from __future__ import annotations

import socket
import sys
import traceback
from collections.abc import Callable

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedloom.core import FedloomError
from fedloom.engine.flower.node import Node
from fedloom.engine.flower.wire import message


def client_app(node_of: Callable[[Context], Node]) -> ClientApp:
    """A `ClientApp` for Flower. node_of: finds or makes the node of a context; may raise `FedloomError`.

    What goes wrong outside a client's work is answered as a refusal, so that the server can tell of it.
    """

    def answer(asked: Message, context: Context) -> Message:
        try:
            content = node_of(context).answer(asked.content)
        except FedloomError as error:
            content = _refusal(context, str(error))
        except Exception as error:  # a method's own code, or a machine that is not as it should be
            traceback.print_exc()
            content = _refusal(context, f"{type(error).__name__}: {error}")
        return Message(content, reply_to=asked)

    app = ClientApp()
    for register in (app.train, app.evaluate, app.query):
        register()(answer)
    return app


def _refusal(context: Context, reason: str) -> RecordDict:
    """The reply of a node that cannot do as it is asked; said on the node too."""
    print(f"error: {reason}", file=sys.stderr, flush=True)
    name = str(context.node_config.get("name", f"{socket.gethostname()} (node {context.node_id})"))
    return message({"refused": reason, "name": name}, {})
