"""Names of signals, also of those that Python's `signal.Signals` does not have."""

import signal


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9, "SIGRTMIN+6" for a real-time signal, else "signal 99"."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a process may be ended by any number; Python names the first and the last real-time signal
        if signal.SIGRTMIN < number < signal.SIGRTMAX:
            return f"SIGRTMIN+{number - signal.SIGRTMIN}"
        return f"signal {number}"
