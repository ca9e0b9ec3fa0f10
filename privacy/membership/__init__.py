"""Membership of a federation: keys, certificates, enrolment, the handshake."""
