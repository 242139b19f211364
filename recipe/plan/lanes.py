"""A rank's computing and its link side by side: which transfers are waited for, and how long."""


class Lanes:
    """Time passes by `work`; transfers travel one behind the other and each keeps the rank busy for a share of them."""

    def __init__(self, *, busy: float) -> None:
        self._busy = busy
        self._now_s = self._link_free_s = 0.0
        self.sent_s = 0.0  # of all transfers, as if each were alone
        self.exposed_s = 0.0  # of that, what was waited for or kept the rank busy

    def work(self, seconds: float) -> None:
        self._now_s += seconds

    def send(self, seconds: float) -> float:
        """Start a transfer; when it will have arrived, for `wait`."""
        host_s = self._busy * seconds
        self._now_s += host_s
        self._link_free_s = max(self._link_free_s, self._now_s) + seconds - host_s
        self.sent_s += seconds
        self.exposed_s += host_s
        return self._link_free_s

    def wait(self, arrival_s: float) -> None:
        if arrival_s > self._now_s:
            self.exposed_s += arrival_s - self._now_s
            self._now_s = arrival_s
