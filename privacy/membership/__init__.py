"""Who belongs to a federation: keys, certificates, enrolment, the handshake."""
