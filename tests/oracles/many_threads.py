"""The same work in many threads at once."""

import threading


def in_threads(work, count=8):
    """Run ``work(number)`` in so many threads at once; the first error is raised here."""
    errors, together = [], threading.Barrier(count)

    def run(number):
        together.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
