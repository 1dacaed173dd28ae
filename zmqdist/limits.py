"""Every bound of zmqdist, with its unit and its reason.

A bound on every queue, loop, frame and table: ZeroMQ's own answer to "too much" is to drop silently, Python's
is to use all memory. Where a config has a key of the same name, that key decides and the figure here is its default.
"""

from __future__ import annotations

from typing import Final

# -- what a stranger can make us allocate -------------------------------------------------------------------------

HEADER_BYTES_MAX: Final = 16 * 2**20
"""Bytes of one header. A header decodes into at most about 16 times its size (a list of one-byte items)."""

FRAME_BYTES_MAX: Final = HEADER_BYTES_MAX
"""Bytes of one frame that a socket accepts (ZMQ_MAXMSGSIZE). More closes the connection. Payload frames are far smaller."""

FRAMES_MAX: Final = 1024
"""Frames of one message, header included: an RPC argument has one frame for each large array in it."""

PAYLOAD_BYTES_MAX: Final = FRAME_BYTES_MAX
"""Bytes of all payload frames of one message. What is larger than CHUNK_BYTES travels in several, so this is far more than any has; without
it one message could keep 16 GiB."""

DEPTH_MAX: Final = 64
"""Nesting of containers in a value of the safe codec. Deeper structures are a mistake or an attack on the stack."""

SAFE_BODY_BYTES_MAX: Final = HEADER_BYTES_MAX - 65_536
"""Bytes of a value of the safe codec beside its large arrays: with the fields of its message it must fit into a header."""

NAMEDTUPLE_FIELDS_MAX: Final = 255
"""Fields of a namedtuple in a value of the safe codec."""

NAMEDTUPLE_KINDS_MAX: Final = 64
"""Different namedtuples in one value of the safe codec: the receiver makes a class for each, which takes time."""

NAMEDTUPLE_KINDS_KEPT_MAX: Final = 256
"""Classes of received namedtuples that a process keeps; the longest unused go first."""

NDIM_MAX: Final = 32
"""Dimensions of an array: NumPy 1's own bound, so that both ends can have either NumPy."""

ARRAY_BYTES_MAX: Final = 2**40
"""Bytes of one array, as a bound on the arithmetic of shapes; memory runs out long before."""

PEERS_MAX: Final = 20_000
"""Authenticated connections of one server; each costs about 30 KiB in libzmq and one file descriptor."""

HANDSHAKE_S: Final = 10.0
"""Seconds in which a connection must have shown who it is. Until then it has a descriptor of the server, and a thousand that say nothing
would take all there are; but thousands of CURVE handshakes at once take seconds."""

CALLS_PENDING_MAX: Final = 65_536
"""Calls of one peer that a server holds unanswered; the next is answered RESOURCE_EXHAUSTED."""

STATE_BYTES_MAX: Final = 2**30
"""Bytes of elements in the state of one iterator. It is text: while it is made and written there are five times as many in memory."""

# -- what travels how ---------------------------------------------------------------------------------------------

INLINE_BYTES_MAX: Final = 65_536
"""A payload up to this rides in the header message; above it, it is bulk. Copying 64 KiB costs less than a frame of its own."""

DEFINITION_INLINE_BYTES_MAX: Final = 4096
"""Bytes of what makes a per-worker resource that travel with each function that uses it; more is fetched where it is to be built, once."""

DEFINITION_BYTES_WARNED: Final = 64 * 2**20
"""Bytes of the same from which on a warning says so: every worker, or slot process, has a copy."""

CHUNK_BYTES: Final = 512 * 2**10
"""Bytes of one bulk chunk, and payload bytes that may ride as frames of one message. Large enough for full speed; small enough that its
copies stay in the cache and that other messages pass in between (a frame that takes longer than the heartbeat's time-out kills its
own connection). Less where the link is slow (transport/pace.py)."""

CHUNK_BYTES_MIN: Final = 16 * 2**10
"""Bytes of a chunk on the slowest links: a quarter of a second at 0.5 Mbit/s."""

LANE_WINDOW_BYTES_START: Final = 32 * 2**10
"""Chunks on the way by a link that nobody knows yet: half a second at 0.5 Mbit/s."""

LANE_WINDOW_BYTES: Final = 2 * 2**20
"""The most chunks on the way in one direction of a connection, whatever the number of transfers: what a small message may find in front
of it. With half of it a small call is a third faster while an array moves, and the array a quarter slower; with twice as much it is no
faster."""

BULK_WINDOW_BYTES: Final = 8 * 2**20
"""The most chunks on the way to one puller of a bulk payload: covers the round trip of a fast network, bounds the sender's queue."""

RECEIVING_BYTES_MAX: Final = 64 * 2**30
"""Bytes of large arguments and answers that one peer may have announced and not yet sent: memory is reserved when they are announced."""

RECEIVED_IDLE_BYTES_MAX: Final = 512 * 2**20
"""Free memory that a process keeps for the next large array that it receives by a socket; twice that at most for a moment."""

ARENA_SLAB_BYTES: Final = 32 * 2**20
"""Bytes of a segment of shared memory that is cut into blocks of one size: a descriptor and a mapping for many small arrays."""

ARENA_BLOCK_BYTES_MIN: Final = 128 * 2**10
"""Smallest block of shared memory; what is not larger than INLINE_BYTES_MAX never goes there."""

ARENA_IDLE_BYTES_MAX: Final = 2**30
"""Free shared memory that a process keeps for the next large array: using warm pages again is four times as fast as touching new ones."""

ARENA_CELLS: Final = 16_384
"""Leases of shared memory that a process can have out; then large arrays travel by sockets. Eight bytes each."""

ARENA_DESCRIPTOR_BYTES_MIN: Final = 2**20
"""A smaller array is not given shared memory that costs a descriptor for as long as it lives: many of them would take all that the
process may have."""

ARENA_MAPPED_MAX: Final = 32
"""Segments of one peer that stay mapped while nothing of them is in use: a descriptor each,"""

ARENA_MAPPED_BYTES_MAX: Final = 2**30
"""and their bytes: a peer that was killed cannot give its pages back to the system, only whoever has them mapped can."""

PULLED_BYTES_MAX: Final = 2**30
"""Arguments from other hosts that a worker keeps for its slots while it has work; the longest unused go first."""

# -- batches ------------------------------------------------------------------------------------------------------

MESSAGES_PER_WAKE_MAX: Final = 256
"""Messages that a loop takes from one socket before it looks at its timer and the other sockets again."""

BATCH_ITEMS_MAX: Final = 512
"""Pieces of work, or results, in one message: by then the cost of the message is spread thin."""

BATCH_BYTES_MAX: Final = 4 * 2**20
"""Payload bytes after which a batch is closed, whatever its count."""

# -- scheduled work -----------------------------------------------------------------------------------------------

QUEUE_MAX: Final = 2**20
"""Pieces of work of one coordinator that wait for a start; then `schedule` blocks. At about 300 bytes each, 300 MB."""

QUEUE_MEMORY_SHARE: Final = 4
"""The arguments of a coordinator's unfinished work take at most a quarter of the memory that its process may use; then `schedule` blocks.
As much as shared memory takes by default, so what waits stays where workers map it; and small arguments, of which a dispatcher on the same
machine has a copy, leave half of the memory to the workers and the rest."""

QUEUE_UNBOUNDED: Final = 2**60
"""The same for a program that wants no bound: twice as much is still a number of 64 bits."""

ATTEMPTS_MAX: Final = 3
"""Starts of one piece of work that may end with the death of their process, before it fails with WorkerLost."""

WORKER_WINDOW_MAX: Final = 4096
"""Pieces of work per slot that a worker may hold unfinished. The window grows to this for tiny work and long ways only
(scheduling/dispatcher/credit.py)."""

ERROR_BYTES_MAX: Final = 2**20
"""Bytes of an exception that travels; a larger one becomes an UnknownError, and its text and traceback are cut."""

ERROR_CHARS_MAX: Final = 2**18
"""Characters of the error that a call ends with; a longer one loses its middle, and says so. One message may have many errors in it."""

FUNCTIONS_KEPT_MAX: Final = 1024
"""Function definitions that one coordinator keeps with the dispatcher and the workers; the longest unused go first."""

LOG_TAIL_LINES: Final = 40
"""Last lines of a slot's output that an error about its death carries. A segfault writes twenty, and those before them are wanted, too."""

LOG_TAIL_BYTES: Final = 4096
"""And their bytes at most."""

SLOTS_MAX: Final = 4096
"""Slots of one worker."""

WORKERS_MAX: Final = 10_000
"""Workers of one dispatcher."""

COORDINATORS_MAX: Final = 10_000
"""Coordinators of one dispatcher."""

# -- what tasks agree on ------------------------------------------------------------------------------------------

BARRIERS_MAX: Final = 16_384
"""Names of barriers that are known; the longest unused is forgotten. A name costs about a kilobyte while its tasks wait."""

KEYS_MAX: Final = 2**20
"""Keys of the key-value store."""

KEY_CHARS_MAX: Final = 1024
"""Characters of a key, and of the name of a barrier."""

KEYS_BYTES_MAX: Final = 2**30
"""Bytes of all keys and values together: what is larger than a configuration belongs into messages, not into the leader's memory."""

TASK_ERRORS_KEPT: Final = 100
"""Errors of tasks that those who ask later are told; older ones show in the task's state only."""

# -- time, in seconds ---------------------------------------------------------------------------------------------

LEASE_S: Final = 10.0
"""A worker of which nothing was heard for this long is lost, where its connection does not tell sooner."""

RECONNECT_GRACE_S: Final = 1.0
"""A worker whose connection went has this long to come back under the same incarnation."""

FAILURES_TOLD: Final = 100
"""Errors of one round that are told beside the first: each costs its memory, and a time to unpickle it."""

CANCEL_GRACE_S: Final = 5.0
"""A running function that was asked to end has this long; then its slot process is cut off."""

GRACE_S: Final = 10.0
"""An orderly stop (Ctrl-C, SIGTERM) drains for this long at most."""

ORPHAN_LIMIT_S: Final = 60.0
"""A worker that finds no dispatcher for this long ends itself."""

INVITED_ORPHAN_LIMIT_S: Final = 10.0
"""The same for the worker of a task that was invited: its task stays, and is invited again by whoever comes next."""

CONNECT_TIMEOUT_S: Final = 180.0
"""The tasks of a cluster with parameter servers have so long to appear: as long as TensorFlow tries."""

INVITE_PATIENCE_S: Final = 1.0 + LEASE_S
"""A worker that says that it is another program's is asked again for so long: that one may have died a moment ago."""

RESTARTS: Final = 3
"""A launcher starts a worker or ps that died so often again: enough for accidents, and one that cannot live is told of soon."""

RESTART_PAUSE_S: Final = 0.2
"""Before the first of them; each further one waits twice as long, up to RESTART_PAUSE_S_MAX."""

RESTART_PAUSE_S_MAX: Final = 10.0
"""A machine that needs longer to be well again needs a person."""

RESTARTS_FORGOTTEN_S: Final = 600.0
"""A task that has lived so long begins to count anew."""

CLUSTER_LOST_LIMIT_S: Final = 60.0
"""`join` and `fetch` raise UnavailableError after this long without a dispatcher, or without any worker."""

WORKER_RECOVERY_TIMEOUT_S: Final = 3600.0
"""Work for one worker alone fails when that one was not there for this long: what started it has mostly given up by then."""

LEADER_WAIT_S: Final = 60.0
"""Questions about barriers and keys that have no time-out of their own wait so long for the leader's first appearance."""

HEARTBEAT_IVL_S: Final = 0.3
"""ZeroMQ's own PING, sent by the side that connects; it runs outside the GIL."""

HEARTBEAT_TIMEOUT_S: Final = 2.0
"""Without an answer for this long libzmq closes the connection. No frame may take longer to transmit."""

HEARTBEAT_SERVER_S: Final = 4.0
"""The side that was connected to sends one, too, and waits as long for the answer: a peer that is stopped before its own first PING
has told this side to expect more would else never be missed."""

WAIT_LOG_S: Final = 10.0
"""A wait without a deadline says every so often whom it waits for."""

NVIDIA_SMI_S: Final = 20.0
"""Seconds for nvidia-smi to list the GPUs of this host; with a broken driver it hangs."""

POD_LIST_S: Final = 30.0
"""Seconds for one answer of a Kubernetes API server."""

POD_LOOK_S: Final = 1.0
"""Who waits for pods looks at them this often."""

# -- files that people write --------------------------------------------------------------------------------------

CONFIG_BYTES_MAX: Final = 2**20
"""Bytes of a cluster file: 10,000 tasks with addresses are 300 kB."""

CONFIG_NODES_MAX: Final = 100_000
"""Values of a cluster file after its aliases are written out: a page of aliases to aliases can stand for billions."""

# -- questions with answers ---------------------------------------------------------------------------------------

HANDLER_THREADS_MAX: Final = 32
"""Handlers of one RPC server that run at a time, besides the inline ones; further calls wait (CALLS_PENDING_MAX a peer)."""

UNASKED_BYTES_MAX: Final = 32 * 2**20
"""Bytes of arguments that a client sends to a server unasked while the calls before are unanswered. What does not fit is pulled by the
server (large arrays) or waits for answers (the rest). The way to another continent at 2.5 Gbit/s holds as much."""

CLIENT_UNASKED_BYTES_MAX: Final = 2 * UNASKED_BYTES_MAX
"""Bytes of one client's arguments that came to a server unasked, for calls that have not begun; the next call is answered
RESOURCE_EXHAUSTED. Twice what a client sends: calls that it has given up count a little longer here."""

UNCOUNTED_BYTES_MAX: Final = CLIENT_UNASKED_BYTES_MAX // CALLS_PENDING_MAX
"""Bytes of arguments that neither end counts among those that were sent unasked: as many calls as a client may have are within the
server's bound. They pass what a client holds back."""

CLIENT_PULLED_BYTES_MAX: Final = 256 * 2**20
"""Bytes of one client's arguments that a server has pulled, for calls that have not begun: enough that each of its threads finds the next
call ready, and little enough for many clients."""

SESSION_THREADS_MAX: Final = 512
"""Functions and accesses of sessions that one task runs at a time; further ones wait. Many, because a function may wait for another."""

SESSION_LOST_S: Final = 60.0
"""A session whose connection went has this long to come back; then the task forgets it, and frees what only it could see."""

SESSIONS_MAX: Final = 65_536
"""Sessions of one task."""

TASK_PROBE_S: Final = 1.0
"""A task that does not answer for so long counts as missing where somebody asks which tasks are there."""

STREAM_ITEMS_AHEAD: Final = 512
"""Items that a generator makes before they are asked for; as many may be on their way. A round trip's worth of small ones."""

STREAM_BYTES_AHEAD: Final = BATCH_BYTES_MAX
"""And their bytes: an item may exceed it, then it is the only one."""

STREAMS_OF_PEER_MAX: Final = 64
"""Streams of one client at one server: a thread of the server each."""

STREAMS_MAX: Final = 512
"""Streams of all clients."""

SERVER_DESCRIPTORS: Final = 32
"""Descriptors that a task's server needs: twelve, as many to its leader, and some for others. Where there are none libzmq
ends the process, or never gets to accept a connection."""

# -- messages and collectives between tasks -------------------------------------------------------------------------

MAIL_ITEMS_MAX: Final = 65_536
"""Messages that a task keeps and nobody has received yet; the next is answered RESOURCE_EXHAUSTED."""

MAIL_BYTES_MAX: Final = 4 * 2**30
"""And their bytes: a sender that is ahead must notice before memory is full. One larger message is taken when nothing else is there."""

COLLECTIVE_TIMEOUT_S: Final = 600.0
"""A collective without a time-out of its own waits this long for the other members, and as long for each of their pieces. Members may be
minutes apart (one reads its data while another compiles); for ever would be a hang that nobody can explain."""

COLLECTIVE_INLINE_BYTES_MAX: Final = 65_536
"""What each member brings up to this size rides along with its announcement, and the leader answers with the result: one round trip."""

COLLECTIVE_PIECE_BYTES: Final = 4 * 2**20
"""Bytes of a piece on a ring. With four processes on two cores half of it is a quarter slower, because each piece wakes two threads."""

COLLECTIVE_WIDTH: Final = 3
"""Pieces of a ring that a member has under way at a time: one is reduced while another travels."""

# -- checkpoints ----------------------------------------------------------------------------------------------------

CHECKPOINT_SHARDS_AT_ONCE: Final = 4
"""Shards that are read, written or checked at a time, in memory each: enough to keep a disk and several parameter servers busy."""

CHECKPOINT_POLL_S: Final = 0.5
"""Who waits for a new checkpoint looks for it this often."""

PS_VERSION_LIFE_BITS: Final = 40
"""Of a variable's version count its changes: 100,000 in a second for four months. Above them is how often it was recovered."""

RECOVERY_LOOK_S: Final = 0.25
"""A parameter server whose variables are to be brought back is asked this often whether it has lost them: a small question."""

# -- the data service: the first eight are tf.data service's defaults ------------------------------------------------

GC_CHECK_S: Final = 600.0
"""How often a dispatcher looks for readers and iterations to let go: nobody waits for it."""

GC_TIMEOUT_S: Final = 300.0
"""An iteration that nobody has read for so long is dropped: longer than a program takes to be started again."""

WORKER_TIMEOUT_S: Final = 600.0
"""A worker that has gone is given up after so long: longer than a machine takes to be started again."""

CLIENT_TIMEOUT_S: Final = 300.0
"""A reader that is silent is let go after so long."""

DISPATCHER_TIMEOUT_S: Final = 3600.0
"""A task waits so long for a dispatcher that does not answer."""

TRAINER_CACHE_BYTES: Final = 10 * 2**30
"""Elements that trainers share, of each worker; they are there only as far as they are read."""

SNAPSHOT_CHUNK_BYTES_MAX: Final = 6 * 10**9
"""A file of a snapshot: few files, and still parts of it can be read."""

WORKER_SNAPSHOTS_MAX: Final = 3
"""Streams of snapshots that one worker writes at a time: each has a pipeline of its own."""

JOURNAL_LOG_BYTES_MAX: Final = 16 * 2**20
"""Bytes that the journal's write-ahead log keeps on the disk; a larger commit lengthens it
for a while only. SQLite moves it into the database every 4 MiB."""

CONSUMERS_MAX: Final = 65_536
"""Readers that may share a job by `num_consumers`: each has a lane of its own, which the dispatcher keeps."""

JOURNAL_RECORDS_MAX: Final = 10_000
"""Records after which a dispatcher writes its state anew in their place: a restart reads them in a fraction of a second."""

# -- variables of parameter servers -------------------------------------------------------------------------------

PS_PATIENCE_S: Final = 10.0
"""Seconds for which a ps that does not answer, while its process may be there, is asked again, with the same update ids."""

PS_LOSSES_MAX: Final = 8
"""Connections to a ps that a question may lose and be asked again: more are not a matter of the network."""

PS_PROGRAM_GONE_S: Final = 10.0
"""Seconds for which a program that opened a session may be without a connection before another one's `open` drops its variables: longer
than any reconnecting, shorter than anybody waits who starts a program again."""

PS_CLIENTS_MAX: Final = 16_384
"""Processes whose last updates a ps remembers, so that none is applied twice; the longest silent go first. About 500 bytes each."""

PS_ONCE_MAX: Final = 65_536
"""Keys of one session for updates that may be asked for again by another process; the oldest go first."""

PS_STEPS_OPEN_MAX: Final = 4
"""Steps of one variable that may wait for gradients at a time: each keeps a sum of the size of the variable. Workers that wait for
the answer of a step have one, or two where one of them is ahead."""

PS_FUNCTIONS_MAX: Final = 1024
"""Update functions of users that a ps keeps unpickled; the longest unused go first, and are sent again."""
