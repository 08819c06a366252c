"""Flower federations: the app folder, certificates, and the two apps that its shims start.

Flower is imported on call only, so that this package can be asked for an app folder where Flower is absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp


def server_app() -> ServerApp:
    """The app that runs the federation on the SuperLink's machine."""
    from fedloom.deploy import apps

    return apps.server_app()


def client_app() -> ClientApp:
    """The app that runs a node's clients."""
    from fedloom.deploy import apps

    return apps.client_app()
