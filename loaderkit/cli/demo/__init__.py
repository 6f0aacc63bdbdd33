"""The whole job on real photographs: load, train, see what training waited for, stop in mid-epoch, resume exactly.

photos.py   the data set         training.py   the model and its checkpoint
show.py     the demo itself      resume.py     the new process that goes on
"""

from loaderkit.cli.demo.show import run_demo

__all__ = ["run_demo"]
