"""Being written: the timeline as a picture."""


def __getattr__(name):
    return object
