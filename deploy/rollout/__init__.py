"""Changing a running world without losing a request: what is to be done (`plan`, pure), doing it
(`act`, `stage`), whether it went well (`judge`, pure), and the socket over which the command line
asks for it (`control`)."""
