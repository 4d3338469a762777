"""Shows what a script sees of its start, and parses options that other programs have too."""

import argparse
import os
import sys

import helper_module

import __main__

print("argv", sys.argv)
print("path", sys.path[0])
print("name", __name__, "file", __file__, "package", repr(__package__), "spec", __spec__)
print("main", __main__.__file__, sys.modules["__main__"] is __main__, sorted(globals()))
print("cwd", os.getcwd(), "helper", helper_module.__file__)
print(helper_module.greet("world"))

parser = argparse.ArgumentParser(description="A script with its own options.")
parser.add_argument("data", nargs="*")
parser.add_argument("--report", default="nothing")
parser.add_argument("--run-dir", default="nowhere")
parser.add_argument("--select", type=int)
parser.add_argument("-m", "--model")

if __name__ == "__main__":
    print(parser.parse_args())
