"""Prints a program's view of its start."""

import json
import os
import signal
import sys
import threading

main = sys.modules["__main__"]
spec = globals().get("__spec__", "absent")
print(
    json.dumps(
        {
            "names": sorted(globals().keys() - {"json", "os", "signal", "sys", "threading", "main", "spec"}),
            "file": globals().get("__file__", "absent"),
            "loader": getattr(__loader__, "__name__", type(__loader__).__name__),
            "spec": getattr(spec, "name", spec),
            "package": __package__,
            "main is this": main.__dict__ is globals(),
            "builtins": type(__builtins__).__name__,
            "argv": sys.argv,
            "orig_argv": sys.orig_argv[1:][-len(sys.argv) :],
            "path": sys.path,
            "folder": os.getcwd(),  # noqa: PTH109 (pathlib would be one more module)
            "environment": sorted(set(os.environ.items()) - {("LC_CTYPE", "C.UTF-8")}),
            "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
            "traced": bool(sys.gettrace() or sys.getprofile()),
            "signals": [signal.getsignal(one) is signal.SIG_DFL for one in (signal.SIGTERM, signal.SIGHUP)],
            "Ctrl-C": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "main thread": threading.current_thread() is threading.main_thread(),
            "threads": threading.active_count(),
            "parent": os.getppid() == int(sys.argv[1]) if "".join(sys.argv[1:2]).isdigit() else None,
            "heavy": [name for name in ("numpy", "torch", "multiprocessing", "json.tool") if name in sys.modules],
            "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
        },
        indent=0,
    )
)
