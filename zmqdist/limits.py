"""Every bound of zmqdist, with its unit and its reason.

There is a bound on every queue, loop, frame and table, because without one ZeroMQ would silently drop messages, and Python would use all
memory. A config key of the same name overrides the figure in this module, which is then its default.
"""

from __future__ import annotations

from typing import Final

# -- what an unknown peer can make this process allocate -------------------------------------------------------------------------

HEADER_BYTES_MAX: Final = 16 * 2**20
"""Bytes of one header. A header decodes into at most about 16 times its size (a list of one-byte items)."""

FRAME_BYTES_MAX: Final = HEADER_BYTES_MAX
"""Bytes of one frame that a socket accepts (ZMQ_MAXMSGSIZE). A larger frame closes the connection. Payload frames are far smaller."""

FRAMES_MAX: Final = 1024
"""Frames of one message, header included. An RPC argument has one frame for each large array in it."""

PAYLOAD_BYTES_MAX: Final = FRAME_BYTES_MAX
"""Bytes of all payload frames of one message. A payload above CHUNK_BYTES is sent in several messages, so no message reaches
this bound; without it one message could occupy 16 GiB.
"""

DEPTH_MAX: Final = 64
"""Levels of nesting in a value of the safe codec. A deeper structure is a mistake, or an attack on the stack."""

SAFE_BODY_BYTES_MAX: Final = HEADER_BYTES_MAX - 65_536
"""Bytes of a value of the safe codec without its large arrays. With the fields of its message the value must fit into a header."""

NAMEDTUPLE_FIELDS_MAX: Final = 255
"""Fields of a namedtuple in a value of the safe codec."""

NAMEDTUPLE_KINDS_MAX: Final = 64
"""Different namedtuples in one value of the safe codec. The receiver creates a class for each, which takes time."""

NAMEDTUPLE_KINDS_KEPT_MAX: Final = 256
"""Classes of received namedtuples that a process keeps; the least recently used are dropped first."""

NDIM_MAX: Final = 32
"""Dimensions of an array: the bound of NumPy 1, so that both processes of a connection may use NumPy 1."""

ARRAY_BYTES_MAX: Final = 2**40
"""Bytes of one array. It bounds the arithmetic on shapes; memory is exhausted long before."""

PEERS_MAX: Final = 20_000
"""Authenticated connections of one server; each costs about 30 KiB in libzmq and one file descriptor."""

HANDSHAKE_S: Final = 10.0
"""Seconds in which a connection must authenticate. Until then it occupies a descriptor of the server, and a thousand silent
connections would occupy all of them. Not less, because thousands of CURVE handshakes at once take seconds.
"""

CALLS_PENDING_MAX: Final = 65_536
"""Calls of one peer that a server holds without a reply; the next one gets RESOURCE_EXHAUSTED."""

STATE_BYTES_MAX: Final = 2**30
"""Bytes of elements in the saved state of one iterator. The state is text, which takes five times as much memory while it is built and
written.
"""

# -- sizes on the wire ---------------------------------------------------------------------------------------------

INLINE_BYTES_MAX: Final = 65_536
"""A payload up to this size is sent in the header message; a larger one is bulk. Copying 64 KiB costs less than a separate frame."""

DEFINITION_INLINE_BYTES_MAX: Final = 4096
"""Bytes of the definition of a per-worker resource that are sent with each function that uses the resource. Each worker fetches a
larger definition once.
"""

DEFINITION_BYTES_WARNED: Final = 64 * 2**20
"""Bytes of the definition of a per-worker resource above which a warning is logged, because every worker or slot process keeps a copy."""

CHUNK_BYTES: Final = 512 * 2**10
"""Bytes of one bulk chunk, and payload bytes that one message may carry as frames. Large enough for full speed; small enough that
copies stay in the cache and that other messages are sent in between (a frame that takes longer than the heartbeat's time-out closes
its own connection). Chunks are smaller on slow links (transport/pace.py).
"""

CHUNK_BYTES_MIN: Final = 16 * 2**10
"""Bytes of a chunk on the slowest links: a quarter of a second at 0.5 Mbit/s."""

BULK_CHANNEL_WINDOW_BYTES_START: Final = 32 * 2**10
"""Bytes of chunks in flight over a link of unknown speed: half a second at 0.5 Mbit/s."""

BULK_CHANNEL_WINDOW_BYTES: Final = 2 * 2**20
"""The most bytes of chunks in flight in one direction of a connection, for all transfers together. A small message may have to wait
behind them. With half as much, a small call is a third faster while an array is sent, and the array a quarter slower; with twice as
much, arrays are not faster.
"""

BULK_WINDOW_BYTES: Final = 8 * 2**20
"""The most bytes of chunks in flight to one process that fetches a bulk payload. It covers the round trip of a fast network and bounds
the sender's queue.
"""

RECEIVING_BYTES_MAX: Final = 64 * 2**30
"""Bytes of large arguments and replies that one peer may have announced but not yet sent, because the receiver reserves memory at the
announcement.
"""

RECEIVED_IDLE_BYTES_MAX: Final = 512 * 2**20
"""Bytes of free memory that a process keeps for the next large array that arrives by a socket. For a moment it may keep twice as
much.
"""

SHM_SLAB_BYTES: Final = 32 * 2**20
"""Bytes of a segment of shared memory that is divided into blocks of one size, so that many small arrays share one descriptor and
one mapping.
"""

SHM_BLOCK_BYTES_MIN: Final = 128 * 2**10
"""Bytes of the smallest block of shared memory; payloads up to INLINE_BYTES_MAX never use shared memory."""

SHM_IDLE_BYTES_MAX: Final = 2**30
"""Bytes of free shared memory that a process keeps for the next large array, because reusing mapped pages is four times as fast as
touching new ones.
"""

SHM_CELLS: Final = 16_384
"""Leases of shared memory that a process can have lent at a time; further large arrays are sent by sockets. Eight bytes each."""

SHM_DESCRIPTOR_BYTES_MIN: Final = 2**20
"""Bytes of the smallest array that may have a descriptor of shared memory of its own for its lifetime. Many smaller ones would use up
the process's descriptors.
"""

SHM_MAPPED_MAX: Final = 32
"""Segments of one peer that stay mapped while none of their blocks is in use. Each takes a descriptor."""

SHM_MAPPED_BYTES_MAX: Final = 2**30
"""Bytes of the segments of one peer that stay mapped while unused. If the peer is killed, the system gets its pages back only when every
process that mapped them unmaps them.
"""

WORKER_CACHE_BYTES_MAX: Final = 2**30
"""Bytes of arguments from other hosts that a worker caches for its slots while it has work; the least recently used are dropped
first.
"""

# -- batches ------------------------------------------------------------------------------------------------------

MESSAGES_PER_WAKE_MAX: Final = 256
"""Messages that a loop takes from one socket before it checks its timers and the other sockets again."""

BATCH_ITEMS_MAX: Final = 512
"""Work items or results in one message. With so many, the cost of the message itself is negligible."""

BATCH_BYTES_MAX: Final = 4 * 2**20
"""Payload bytes after which a batch is closed, whatever the number of its items."""

# -- scheduled work -----------------------------------------------------------------------------------------------

QUEUE_MAX: Final = 2**20
"""Work items of one coordinator that wait for a start; at the bound `schedule` blocks. At about 300 bytes each, 300 MB."""

QUEUE_MEMORY_SHARE: Final = 4
"""The arguments of a coordinator's unfinished work take at most 1/4 of the memory that its process may use; at the bound `schedule`
blocks. Shared memory takes as much by default, so that waiting arguments stay where workers map them. A dispatcher on the same host
has copies of small arguments, so half of the memory remains for the workers and other processes.
"""

QUEUE_UNBOUNDED: Final = 2**60
"""QUEUE_MAX of a program that wants no bound. Not larger, so that twice as much still fits into 64 bits."""

ATTEMPTS_MAX: Final = 3
"""Attempts of one work item that may end with a crash of their process before it fails with WorkerLost."""

WORKER_WINDOW_MAX: Final = 4096
"""Unfinished work items per slot that a worker may hold. The window grows to this only for tiny work over long round trips
(scheduling/dispatcher/credit.py).
"""

ERROR_BYTES_MAX: Final = 2**20
"""Bytes of an exception that is sent to another process. A larger one becomes an UnknownError with shortened text and traceback."""

ERROR_CHARS_MAX: Final = 2**18
"""Characters of the error that ends a call. The middle of a longer one is replaced by a note. One message may carry many errors."""

FUNCTIONS_KEPT_MAX: Final = 1024
"""Function definitions that the dispatcher and the workers keep for one coordinator; the least recently used are dropped first."""

LOG_TAIL_LINES: Final = 40
"""Last lines of a slot's output in the error about its crash. A segfault prints twenty, and the lines before those are the useful
ones.
"""

LOG_TAIL_BYTES: Final = 4096
"""Bytes of the last lines of a slot's output in the error about its crash."""

SLOTS_MAX: Final = 4096
"""Slots of one worker."""

WORKERS_MAX: Final = 10_000
"""Workers of one dispatcher."""

COORDINATORS_MAX: Final = 10_000
"""Coordinators of one dispatcher."""

# -- barriers and keys of tasks ------------------------------------------------------------------------------------------

BARRIERS_MAX: Final = 16_384
"""Names of barriers that are kept; the least recently used is dropped first. A name takes about a kilobyte while tasks wait at it."""

KEYS_MAX: Final = 2**20
"""Keys of the key-value store."""

KEY_CHARS_MAX: Final = 1024
"""Characters of a key, and of the name of a barrier."""

KEYS_BYTES_MAX: Final = 2**30
"""Bytes of all keys and values together. Data that is larger than a configuration belongs in messages, not in the leader's memory."""

TASK_ERRORS_KEPT: Final = 100
"""Errors of tasks that are kept for tasks that ask later; an older error shows only in the state of its task."""

# -- time, in seconds ---------------------------------------------------------------------------------------------

LEASE_S: Final = 10.0
"""Seconds without a message after which a worker is lost, unless the end of its connection shows that sooner."""

RECONNECT_GRACE_S: Final = 1.0
"""Seconds that a worker has after its connection ended to reconnect under the same incarnation."""

FAILURES_KEPT: Final = 100
"""Errors of one round that are reported in addition to the first. Each takes memory, and time to unpickle it."""

CANCEL_GRACE_S: Final = 5.0
"""Seconds that a running function has to end after it was cancelled; then its slot process is killed."""

GRACE_S: Final = 10.0
"""Seconds for which an orderly stop (Ctrl-C, SIGTERM) waits for running work, at most."""

ORPHAN_LIMIT_S: Final = 60.0
"""Seconds after which a worker stops if it finds no dispatcher."""

INVITED_ORPHAN_LIMIT_S: Final = 10.0
"""Seconds without a dispatcher after which the worker of a task that a program has recruited stops. Shorter than ORPHAN_LIMIT_S, because
the task stays, and the next program recruits it again.
"""

CONNECT_TIMEOUT_S: Final = 180.0
"""Seconds for which a program waits for the tasks of a cluster with parameter servers: as long as TensorFlow does."""

INVITE_PATIENCE_S: Final = 1.0 + LEASE_S
"""Seconds for which a program keeps asking a worker that belongs to another program, because that program may have crashed a moment
ago.
"""

RESTARTS: Final = 3
"""How often a launcher restarts a worker or ps that crashed: enough for accidents, but few, so that a task that can never run is
reported soon.
"""

RESTART_PAUSE_S: Final = 0.2
"""Seconds before the first restart; each further one waits twice as long, up to RESTART_PAUSE_S_MAX."""

RESTART_PAUSE_S_MAX: Final = 10.0
"""The longest pause before a restart, in seconds. A host that needs longer to recover needs a person."""

DESCRIBED_WORKS_MAX: Final = 100_000
"""Work items that a coordinator names for the report about a drain, which takes it a tenth of a second and a message of a few MB."""

DESCRIBED_S: Final = 1.0
"""Seconds that a coordinator has to name its work for the report about a drain: its loop replies at once unless its process is stopped."""

WORKER_IDLE_S: Final = 60.0
"""Seconds without work after which a worker leaves a cluster with `min` and `max`: longer than most pauses of a program."""

RESTARTS_FORGOTTEN_S: Final = 600.0
"""Seconds for which a task must run after a restart; then its restarts are counted from zero again."""

CLUSTER_LOST_LIMIT_S: Final = 60.0
"""Seconds without a dispatcher, or without any worker, after which `join` and `fetch` raise UnavailableError."""

WORKER_RECOVERY_TIMEOUT_S: Final = 3600.0
"""Seconds after which work pinned to a worker fails if that worker is missing. Most launchers have given the worker up by then."""

LEADER_WAIT_S: Final = 60.0
"""Seconds for which requests about barriers and keys without a time-out of their own wait for the leader to appear the first time."""

HEARTBEAT_IVL_S: Final = 0.3
"""Seconds between ZeroMQ's own PINGs from the side that connects; libzmq sends them outside the GIL."""

HEARTBEAT_TIMEOUT_S: Final = 2.0
"""Seconds without a reply to a PING after which libzmq closes the connection. No frame may take longer to transmit."""

HEARTBEAT_SERVER_S: Final = 4.0
"""Seconds between PINGs of the side that accepted the connection, and for the reply. This side sends them as well, because it would
otherwise never notice a peer that is suspended before its own first PING has announced a time-out.
"""

WAIT_LOG_S: Final = 10.0
"""Seconds between log lines of a wait without a deadline, which name the peer that is awaited."""

NVIDIA_SMI_S: Final = 20.0
"""Seconds that nvidia-smi may take to list the GPUs of this host. With a broken driver it hangs."""

POD_LIST_S: Final = 30.0
"""Seconds for one reply of a Kubernetes API server."""

POD_POLL_S: Final = 1.0
"""Seconds between two checks of the pods while a resolver waits for them."""

POD_READY_LOOK_S: Final = 5
"""Seconds between two checks of a node whether a pod's port is bound. Cheap: one TCP connection."""

POD_ALIVE_LOOK_S: Final = 60
"""Seconds between two checks of a node whether a server replies. Each starts a Python: half a second of a core."""

POD_ALIVE_ANSWER_S: Final = 30
"""Seconds that the check whether a server replies may take on a busy node."""

POD_ALIVE_FAILURES: Final = 3
"""Such checks in a row without a reply after which Kubernetes restarts the server, which loses the data in its memory."""

POD_GRACE_MARGIN_S: Final = 5
"""Seconds that a pod has in addition to the grace of its role. In them the role ends its children and connections."""

# -- files that people write --------------------------------------------------------------------------------------

CONFIG_BYTES_MAX: Final = 2**20
"""Bytes of a cluster file: 10,000 tasks with addresses are 300 kB."""

CONFIG_NODES_MAX: Final = 100_000
"""Values of a cluster file after its aliases are expanded, because a page of aliases to aliases can expand to billions."""

# -- calls and replies ---------------------------------------------------------------------------------------

HANDLER_THREADS_MAX: Final = 32
"""Handlers of one RPC server that run at a time, not counting inline ones; further calls wait (CALLS_PENDING_MAX for each peer)."""

EAGER_BYTES_MAX: Final = 32 * 2**20
"""Bytes of arguments that a client sends with its calls while earlier calls have no reply. Beyond this, the server pulls large arrays,
and other arguments wait for replies. A path to another continent at 2.5 Gbit/s holds as much in flight.
"""

CLIENT_UNASKED_BYTES_MAX: Final = 2 * EAGER_BYTES_MAX
"""Bytes of one client's arguments that were sent with calls that have not begun; the next call gets RESOURCE_EXHAUSTED. Twice as much as
a client sends, because the server counts calls that the client has given up a little longer.
"""

UNCOUNTED_BYTES_MAX: Final = CLIENT_UNASKED_BYTES_MAX // CALLS_PENDING_MAX
"""Bytes of arguments up to which neither process counts a call as sent unasked. So small that all calls a client may have stay within
the server's bound; such calls overtake those that the client holds back.
"""

CLIENT_PULLED_BYTES_MAX: Final = 256 * 2**20
"""Bytes of one client's arguments that a server has pulled for calls that have not begun: enough to keep a call ready for each
thread, and little enough for many clients.
"""

SESSION_THREADS_MAX: Final = 512
"""Functions and accesses of sessions that one task runs at a time; further ones wait. Many, because a function may wait for another."""

SESSION_LOST_S: Final = 60.0
"""Seconds that a session has to reconnect after its connection ended; then the task drops it, and frees the objects that only the
session could refer to.
"""

SESSIONS_MAX: Final = 65_536
"""Sessions of one task."""

TASK_PROBE_S: Final = 1.0
"""Seconds after which a task that does not reply counts as missing in a list of present tasks."""

STREAM_ITEMS_AHEAD: Final = 512
"""Items that a generator produces before the client requests them; as many may be in flight. It covers a round trip of small items."""

STREAM_BYTES_AHEAD: Final = BATCH_BYTES_MAX
"""Bytes of the items that a generator produces ahead. A larger item is allowed if it is the only one."""

STREAMS_OF_PEER_MAX: Final = 64
"""Streams of one client at one server: each takes a thread of the server."""

STREAMS_MAX: Final = 512
"""Streams of all clients at one server."""

SERVER_DESCRIPTORS: Final = 32
"""Descriptors that a task's server needs: twelve, as many for its connection to the leader, and some for others. Without descriptors
libzmq ends the process, or never accepts a connection.
"""

# -- messages and collectives between tasks -------------------------------------------------------------------------

MAIL_ITEMS_MAX: Final = 65_536
"""Messages that a task keeps until they are received; the next one gets RESOURCE_EXHAUSTED."""

MAIL_BYTES_MAX: Final = 4 * 2**30
"""Bytes of the messages that a task keeps until they are received, because a sender that runs ahead must notice before memory is full.
One larger message is accepted if no other is kept.
"""

COLLECTIVE_TIMEOUT_S: Final = 600.0
"""Seconds for which a collective without a time-out of its own waits for the other members, and for each of their pieces. Members
may be minutes apart (one reads its data while another compiles); an unbounded wait would be a hang without an explanation.
"""

COLLECTIVE_INLINE_BYTES_MAX: Final = 65_536
"""Bytes of a member's contribution that are sent with its announcement. The leader replies with the result, in one round trip."""

COLLECTIVE_PIECE_BYTES: Final = 4 * 2**20
"""Bytes of a piece on a ring. With four processes on two cores, half as much is a quarter slower, because each piece wakes two threads."""

COLLECTIVE_WIDTH: Final = 3
"""Pieces of a ring that a member processes at a time: one is reduced while another is on its way."""

# -- checkpoints ----------------------------------------------------------------------------------------------------

CHECKPOINT_SHARDS_AT_ONCE: Final = 4
"""Shards that are read, written or checked at a time, each in memory: enough to keep a disk and several parameter servers busy."""

CHECKPOINT_POLL_S: Final = 0.5
"""Seconds between two checks for a new checkpoint."""

PS_VERSION_INCARNATION_SHIFT: Final = 40
"""Bits of a variable's version that count its changes: 100,000 per second for four months. The bits above these count how often the
variable was recovered.
"""

RECOVERY_POLL_S: Final = 0.25
"""Seconds between two checks whether a parameter server has lost its variables. Each is a small call."""

# -- the data service: the first eight are tf.data service's defaults ------------------------------------------------

GC_CHECK_S: Final = 600.0
"""Seconds between two checks of a dispatcher for unused readers and iterations. Long, because no caller waits for it."""

GC_TIMEOUT_S: Final = 300.0
"""Seconds after which an iteration without readers is dropped: longer than the restart of a program takes."""

WORKER_TIMEOUT_S: Final = 600.0
"""Seconds after which a worker that has disconnected is given up: longer than the restart of a host takes."""

CLIENT_TIMEOUT_S: Final = 300.0
"""Seconds after which a silent reader is dropped."""

DISPATCHER_TIMEOUT_S: Final = 3600.0
"""Seconds for which a data task waits for a dispatcher that does not reply."""

TRAINER_CACHE_BYTES: Final = 10 * 2**30
"""Bytes of elements that each worker keeps for trainers that share them; an element takes memory only once it was read."""

SNAPSHOT_CHUNK_BYTES_MAX: Final = 6 * 10**9
"""Bytes of one file of a snapshot, so that there are few files, which can still be read in parts."""

WORKER_SNAPSHOTS_MAX: Final = 3
"""Streams of snapshots that one worker writes at a time. Each has a pipeline of its own."""

JOURNAL_LOG_BYTES_MAX: Final = 16 * 2**20
"""Bytes that the journal's write-ahead log keeps on disk; a larger commit lengthens it only for a while. SQLite moves its content into
the database every 4 MiB.
"""

CONSUMERS_MAX: Final = 65_536
"""Readers that may share a job by `num_consumers`. The dispatcher keeps state for each."""

JOURNAL_RECORDS_MAX: Final = 10_000
"""Records after which a dispatcher replaces them by its whole state, so that a restart reads them in a fraction of a second."""

# -- variables of parameter servers -------------------------------------------------------------------------------

PS_PATIENCE_S: Final = 10.0
"""Seconds for which requests to a silent ps are repeated, with the same update ids, while its process may still exist."""

PS_LOSSES_MAX: Final = 8
"""Connections that a request to a ps may lose and still be repeated. More losses are not the network's fault."""

PS_PROGRAM_GONE_S: Final = 10.0
"""Seconds for which a program that opened a session may be without a connection before another program's `open` drops its variables:
longer than any reconnect takes, and shorter than a user waits for a restarted program.
"""

PS_CLIENTS_MAX: Final = 16_384
"""Processes whose last updates a ps remembers, so that no update is applied twice; the longest silent ones are dropped first. About 500
bytes each.
"""

PS_UPDATE_KEYS_MAX: Final = 65_536
"""Keys that a ps remembers in one session, of updates that another process may repeat; the oldest are dropped first."""

PS_STEPS_OPEN_MAX: Final = 4
"""Steps of one variable that may wait for gradients at a time. Each holds a sum as large as the variable. Workers that wait for the
reply of each step need one step, or two if one of them is ahead.
"""

PS_FUNCTIONS_MAX: Final = 1024
"""Users' update functions that a ps keeps unpickled; the least recently used are dropped first, and are sent again."""

# -- keys of members ------------------------------------------------------------------------------------------------

JOIN_VALID_S: Final = 60.0
"""Seconds in which a join token can be used by default: longer than a process takes to start on a busy host."""

JOIN_TOKENS_MAX: Final = 20_000
"""Join tokens that a dispatcher keeps, ended ones included, because with these it can tell a second use from a wrong token."""

JOIN_EXPLAINED_S: Final = 600.0
"""Seconds for which the dispatcher tells a process that its join token has ended. After that it refuses the key as unknown."""

JOINING_MAX: Final = 1024
"""Connections of unknown keys that a dispatcher lets in within HANDSHAKE_S to show a join token. Those that show none
are ended after that time, so strangers hold no more descriptors than this.
"""

MEMBER_KEYS_MAX: Final = 65_536
"""Keys that a dispatcher keeps, revoked ones included. It never forgets a revoked key, because a forgotten key could join again."""

REPLACED_KEYS_MAX: Final = 1024
"""Replaced keys that a dispatcher keeps besides those that open ports show, to tell their processes why it refuses them. Each restart
of a process that joins, and each rotation, replaces one.
"""

KEY_QUESTIONS_MAX: Final = 32_768
"""Keys and addresses that one process may ask its dispatcher about; more is a mistake, or an attack on memory."""

KEY_RENEWAL_S: Final = 5.0
"""Seconds for which a replaced key keeps its role, so that connections that are being made with it succeed."""

VOUCHING_S: Final = 2.0
"""Seconds that a connection with a key of the static `authorized` file waits for the dispatcher to tell whether the key was revoked."""

# -- agents of hosts -----------------------------------------------------------------------------------------------------

AGENT_BEAT_S: Final = 2.0
"""Seconds between two heartbeats of a launcher to an agent. An agent that hears none for the `orphan_limit_s` of the workers ends."""

AGENT_SILENCE_S_MIN: Final = 5 * AGENT_BEAT_S
"""Seconds of silence that an agent tolerates at least: with a shorter limit, a pause of the launcher or of the link would end agents."""

AGENT_HELLO_S: Final = 60.0
"""Seconds that a host has to send its hello: ssh may go through jump hosts, and Python be read from a slow file system."""

AGENT_CLOCK_S: Final = 60.0
"""Seconds by which the clock of a host may differ from the launcher's without a warning."""

RAY_REACH_S: Final = 5.0
"""Seconds that a TCP connection to the address of a Ray cluster may take."""

RAY_JOIN_S: Final = 60.0
"""Seconds that joining a Ray cluster may take. Ray itself would wait for minutes for a cluster that has ended."""

RAY_PLACE_S: Final = 30.0
"""Seconds that Ray has to place an actor. Less than AGENT_HELLO_S, so that the error says what is missing."""

RAY_LINES_MAX: Final = 1000
"""Lines of an agent that its actor holds until the launcher takes them. When it holds so many, the agent waits."""

CODE_BYTES_MAX: Final = 64 * 2**20
"""Bytes of the files of a program that a launcher sends to a host: ten times a large project. More is data, or a forgotten folder."""

CODE_FILE_BYTES_MAX: Final = 4 * 2**20
"""Bytes of one file of a program that a launcher sends to a host; larger files are left out."""

CODE_FILES_MAX: Final = 20_000
"""Files of a program that a launcher sends to a host."""

CODE_PART_BYTES: Final = 2**18
"""Bytes of one order with code: short enough that a heartbeat can be sent in between on a slow line."""
