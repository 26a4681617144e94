"""The same work in many threads at once."""

import threading
import time


def in_threads(work, count=8):
    """Run ``work(number)`` in so many threads at once; the first error is raised here, or that they do not end."""
    errors, together = [], threading.Barrier(count)

    def run(number):
        together.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 600  # a busy machine, too
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "the threads wait for each other"
