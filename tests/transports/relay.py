"""A cable between two programs on this machine that can be cut, held up and mended."""

import selectors
import socket
import threading


class Relay:
    """Pass bytes on in both directions between whoever connects and one address."""

    def __init__(self, target):
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)
        self.address = self._server.getsockname()
        self._pairs = {}
        self._is_cut = False
        self._is_held = False
        self._stopping = threading.Event()
        self.num_connections = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self):
        """Close what is open, and whatever is opened from now on."""
        self._is_cut = True

    def hold(self):
        """Pass nothing on, but keep everything open."""
        self._is_held = True

    def mend(self):
        self._is_cut = self._is_held = False

    def _run(self):
        while not self._stopping.is_set():
            readable = self._selector.select(0.01)
            if self._is_cut:
                self._close_all()
            for key, _ in readable:
                if key.fileobj is self._server:
                    self._connect()
                elif not self._is_held and key.fileobj in self._pairs:
                    self._pass_on(key.fileobj)
            if self._is_held:
                self._stopping.wait(0.01)
        self._close_all()
        self._selector.close()
        self._server.close()

    def _connect(self):
        near, _ = self._server.accept()
        if self._is_cut:
            near.close()
            return
        self.num_connections += 1
        far = socket.create_connection(self._target)
        for one, other in ((near, far), (far, near)):
            self._pairs[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, one):
        try:
            data = one.recv(1 << 16)
            if data:
                self._pairs[one].sendall(data)
                return
        except OSError:
            pass
        self._close(one)

    def _close(self, one):
        for end in (one, self._pairs.get(one)):
            if end in self._pairs:
                del self._pairs[end]
                self._selector.unregister(end)
                end.close()

    def _close_all(self):
        for one in tuple(self._pairs):
            self._close(one)

    def close(self):
        self._stopping.set()
        self._thread.join()
