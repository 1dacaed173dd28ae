"""The bounds of zmqdist that are not a detail of one module, with their units and reasons.

Every queue, loop, frame and table has a bound. Without a bound ZeroMQ would silently drop messages,
and Python would use all memory. Where a config has a key with the name of a bound, the figure in
this module is the default of the key.
"""

from __future__ import annotations

from typing import Final

# -- what an unknown peer can make this process allocate -------------------------------------------

HEADER_BYTES_MAX: Final = 16 * 2**20
"""Bytes of one header. The decoded header takes at most about 16 times as much memory, which is the
case of a list of one-byte items."""

HEADER_PIECE_BYTES: Final = 16 * 2**10
"""Bytes of a header that are sent as one frame. Heartbeats pass between two frames only, and a link
of 0.5 Mbit/s needs a quarter of a second for such a frame.
"""

UNSENT_BYTES_MAX: Final = 32 * 2**10
"""Bytes of a connection that wait in the kernel although the network has room for fewer
(TCP_NOTSENT_LOWAT). ZeroMQ sends a heartbeat before the messages in its own queue, but after these
bytes, which would be megabytes without this bound.
"""

FRAME_BYTES_MAX: Final = HEADER_BYTES_MAX
"""Bytes of one frame that a socket accepts (ZMQ_MAXMSGSIZE). libzmq closes a connection on which a
larger frame arrives. Payload frames are far smaller.
"""

FRAMES_MAX: Final = 1024
"""Frames of one message, header included. An RPC argument has one frame for each large array in
it.
"""

PAYLOAD_BYTES_MAX: Final = FRAME_BYTES_MAX
"""Bytes of all payload frames of one message. A payload above CHUNK_BYTES is sent in several
messages, so that no correct message reaches this bound. Without the bound one message could occupy
16 GiB.
"""

DEPTH_MAX: Final = 64
"""Levels of nesting in a value of the safe codec. A deeper structure is a mistake, or an attack on
the stack."""

SAFE_BODY_BYTES_MAX: Final = HEADER_BYTES_MAX - 65_536
"""Bytes of a value of the safe codec without its large arrays. The value and the other fields of
its message must fit into one header."""

NAMEDTUPLE_FIELDS_MAX: Final = 255
"""Fields of a namedtuple in a value of the safe codec."""

NAMEDTUPLE_KINDS_MAX: Final = 64
"""Different namedtuple classes in one value of the safe codec. The receiver has to create each
class, which takes time."""

NAMEDTUPLE_KINDS_KEPT_MAX: Final = 256
"""Classes of received namedtuples that a process keeps; the least recently used are dropped
first.
"""

NDIM_MAX: Final = 64
"""Dimensions of an array: the bound of NumPy 2. A process with NumPy 1, which allows 32, refuses an
array of more by NumPy's own text."""

ARRAY_BYTES_MAX: Final = 2**40
"""Bytes of one array that a peer may announce. Memory is exhausted long before an array is so
large."""

PEERS_MAX: Final = 20_000
"""Authenticated connections of one server; each costs about 30 KiB in libzmq and one file
descriptor."""

HANDSHAKE_S: Final = 10.0
"""Seconds in which a connection must authenticate. Until then the connection occupies a file
descriptor of the server, and a thousand silent connections would occupy all of them. A shorter time
would be too short for thousands of CURVE handshakes at once, which take seconds.
"""

CALLS_PENDING_MAX: Final = 65_536
"""Calls of one peer that a server holds without a reply. The next call gets RESOURCE_EXHAUSTED."""

STATE_BYTES_MAX: Final = 2**30
"""Bytes of elements in the saved state of one iterator. The state is text, and takes five times as
much memory while it is built and written.
"""

# -- sizes on the wire -----------------------------------------------------------------------------

INLINE_BYTES_MAX: Final = 65_536
"""Bytes of the largest payload that is sent in the header, because copying 64 KiB costs less than a
separate frame. A larger payload is *large*.
"""

CALL_INLINE_BYTES_MAX: Final = 12 * 2**10
"""Bytes of the largest array that is in the header of a call or reply. A larger one has a frame of
its own, because in a header it would be copied several times, and cut into pieces
(HEADER_PIECE_BYTES). For a smaller one, a frame takes longer than the copies.
"""

DEFINITION_INLINE_BYTES_MAX: Final = 4096
"""Bytes of the definition of a per-worker resource that are sent with each function that uses the
resource. Each worker fetches a larger definition once.
"""

DEFINITION_BYTES_WARNED: Final = 64 * 2**20
"""Bytes of the definition of a per-worker resource above which a warning is logged, because every
worker or slot process keeps a copy."""

CHUNK_BYTES: Final = 512 * 2**10
"""Bytes of one bulk chunk, and payload bytes that one message may carry as frames. This is large
enough for full speed. It is small enough that copies stay in the cache, and that other messages are
sent between two chunks. A frame whose transfer takes longer than the heartbeat's time-out would
make libzmq close the connection, so chunks are smaller on slow links (transport/bulk_machine.py).
"""

CHUNK_BYTES_MIN: Final = 16 * 2**10
"""Bytes of a chunk on the slowest links. Such a chunk takes a quarter of a second at 0.5 Mbit/s."""

BULK_CHANNEL_WINDOW_BYTES_START: Final = 32 * 2**10
"""Bytes of chunks in flight over a link whose speed is not known. They take half a second at 0.5
Mbit/s."""

BULK_CHANNEL_WINDOW_BYTES: Final = 2 * 2**20
"""The most bytes of chunks in flight in one direction of a connection, for all transfers together.
A small message may have to wait for these chunks. With half as many bytes, a small call during the
transfer of an array would be a third faster, but the transfer a quarter slower. With twice as many
bytes, transfers would not be faster.
"""

BULK_WINDOW_BYTES: Final = 8 * 2**20
"""The most bytes of chunks in flight to one process that fetches a large payload. This is enough
for the round trip of a fast network, and bounds the sender's queue.
"""

RECEIVING_BYTES_MAX: Final = 64 * 2**30
"""Bytes of large arguments and replies that one peer may have announced but not yet sent, because
the receiver reserves memory at the announcement.
"""

RECEIVED_IDLE_BYTES_MAX: Final = 512 * 2**20
"""Bytes of free memory that a process keeps for the next large array that arrives over a socket.
For a moment the process may keep twice as much.
"""

SHM_SLAB_BYTES: Final = 32 * 2**20
"""Bytes of a segment of shared memory that is divided into blocks of one size. Many small arrays
then share one file descriptor and one mapping.
"""

SHM_BLOCK_BYTES_MIN: Final = 128 * 2**10
"""Bytes of the smallest block of shared memory. Payloads up to INLINE_BYTES_MAX never use shared
memory."""

SHM_IDLE_BYTES_MAX: Final = 2**30
"""Bytes of free shared memory that a process keeps for the next large array, because reusing mapped
pages is four times as fast as touching new ones.
"""

SHM_CELLS: Final = 16_384
"""Blocks of shared memory that a process can lend at a time. Further large arrays are sent over
sockets. Each loan takes eight bytes."""

LENT_BYTES_MIN: Final = 256 * 2**10
"""Bytes. If a call or reply has more bytes of large parts, they travel in shared memory on one host.
Fewer bytes travel faster as frames of the message."""

SHM_DESCRIPTOR_BYTES_MIN: Final = 2**20
"""Bytes of the smallest array that may have its own file descriptor of shared memory for its
lifetime. Many smaller arrays would use up the process's file descriptors.
"""

SHM_MAPPED_MAX: Final = 32
"""Segments of one peer that stay mapped while none of their blocks is in use. Each segment takes a
file descriptor."""

SHM_MAPPED_BYTES_MAX: Final = 2**30
"""Bytes of the segments of one peer that stay mapped while unused. If the peer is killed, the
kernel frees the pages of its segments only when every process that has mapped them unmaps them.
"""

WORKER_CACHE_BYTES_MAX: Final = 2**30
"""Bytes of arguments from other hosts that a worker caches for its slots while it has work. The
worker drops the least recently used arguments first.
"""

# -- batches ---------------------------------------------------------------------------------------

MESSAGES_PER_WAKE_MAX: Final = 256
"""Messages that a loop takes from one socket before it checks its timers and the other sockets
again."""

BATCH_ITEMS_MAX: Final = 512
"""Work items or results in one message. With so many, the cost of the message itself is
negligible.
"""

BATCH_BYTES_MAX: Final = 64 * 2**10
"""Payload bytes after which a batch is closed, whatever the number of its items. The items of a
batch begin when the whole batch has arrived, and each message that arrives shows that its sender is
alive, so batches are small enough for slow links.
"""

# -- scheduled work --------------------------------------------------------------------------------

QUEUE_MAX: Final = 2**20
"""Work items of one coordinator that may wait for a worker. At the bound `schedule` blocks. At
about 300 bytes each, they take 300 MB."""

QUEUE_MEMORY_SHARE: Final = 4
"""The arguments of a coordinator's unfinished work take at most 1/4 of the memory that the
coordinator's process may use. At the bound `schedule` blocks. Shared memory may take as much by
default, so that all waiting arguments fit into the shared memory that workers map. A dispatcher on
the same host has copies of small arguments. The other half of the memory remains for the workers
and other processes.
"""

QUEUE_UNBOUNDED: Final = 2**60
"""The QUEUE_MAX of a program that wants no bound. Twice this number still fits into 64 bits."""

ATTEMPTS_MAX: Final = 3
"""Lost starts after which a work item fails with WorkerLost, and how often a lost value with a
lineage is recomputed."""

WORKER_WINDOW_MAX: Final = 4096
"""Unfinished work items for each slot that a worker may hold. The window grows to this bound only
if work is tiny and round trips are long (scheduling/dispatcher/records.py).
"""

ERROR_BYTES_MAX: Final = 2**20
"""Bytes of an exception that is sent to another process. A larger exception keeps its class, and
its large parts become short texts."""

ERROR_CHARS_MAX: Final = 2**18
"""Characters of the error that ends a call, because one message may carry many errors. The middle
of a longer text is replaced by a note.
"""

FUNCTIONS_KEPT_MAX: Final = 1024
"""Functions of one coordinator that the dispatcher and the workers keep, and functions in one cache
of a process. The coordinator, or the owner of the cache, first drops the function that was not used
for the longest time.
"""

LOG_TAIL_LINES: Final = 40
"""Last lines of a slot's output in the error about its crash. A segfault prints twenty lines, and
the most useful lines precede them."""

LOG_TAIL_BYTES: Final = 4096
"""Bytes of the last lines of a slot's output in the error about its crash."""

LOG_LINE_BYTES_MAX: Final = 4096
"""Bytes of a line of output that programs get; the rest of a longer line is cut."""

LOG_LINES_KEPT: Final = 10_000
"""Lines of output that a worker keeps for programs that ask for them, and a dispatcher for those
that follow them."""

LOG_BYTES_KEPT: Final = 4 * 1024 * 1024
"""Characters of these lines: binary output makes long ones."""

LOG_LINES_PER_S: Final = 500
"""Lines of output a second, on average, that a worker takes from one of its processes. More than
a person reads; a million lines would fill the memory of programs that follow them."""

LOG_BURST_LINES: Final = 5000
"""Lines of output that a worker takes from one of its processes at once."""

PROFILE_S_MAX: Final = 600.0
"""The longest profile. Each second costs up to a fifth of a core of its worker."""

ANSWER_S: Final = 10.0
"""Seconds that a worker may take to answer a question about its inside, beyond the seconds that the
question itself takes. Its loop answers in milliseconds, its processes in up to 8 s."""

SLOTS_MAX: Final = 4096
"""The largest number of slots of one worker."""

NESTED_SLOTS_MAX: Final = 64
"""The largest number of extra slots of one worker. Functions that wait for the functions which they
have scheduled need one each, and recursion needs about as many for each slot as it has levels. A
slot is a process of some 10 MiB, and needs three descriptors.
"""

QUANTITIES_MAX: Final = 32
"""The largest number of resources that a worker has, or that a function needs."""

QUANTITY_MAX: Final = 10**12
"""The largest quantity of a resource, in thousandths."""

WORKER_INDEX_MAX: Final = 10**9 - 1
"""The largest index of a worker. Indices may have gaps, so it is larger than the number of
workers.
"""

WORKER_TAGS_MAX: Final = 64
"""The largest number of tags of one worker."""

NAME_CHARS_MAX: Final = 255
"""Characters of a name, host, address or tag that a process gives itself. A host name in DNS has at
most 253."""

NUMBER_MAX: Final = 2**64 - 1
"""The largest number that a process draws for itself, such as its incarnation: 64 bits."""

WORKERS_MAX: Final = 10_000
"""The largest number of workers of one dispatcher."""

COORDINATORS_MAX: Final = 10_000
"""The largest number of coordinators of one dispatcher."""

# -- barriers and keys of tasks --------------------------------------------------------------------

BARRIERS_MAX: Final = 16_384
"""Names of barriers that the keeper keeps. It drops the least recently used name first. A barrier
at which tasks wait takes about a kilobyte.
"""

KEYS_MAX: Final = 2**20
"""The largest number of keys in the key-value store."""

KEY_CHARS_MAX: Final = 1024
"""The largest number of characters of a key, and of the name of a barrier."""

KEYS_BYTES_MAX: Final = 2**30
"""Bytes of all keys and values together. Data that is larger than a configuration belongs in
messages, not in the keeper's memory."""

PRIMITIVES_MAX: Final = 65_536
"""Locks, semaphores, queues and events of one dispatcher that are in use at a time. Each takes about
a kilobyte."""

PRIMITIVE_CLIENTS_MAX: Final = 65_536
"""Processes that use locks, semaphores, queues and events of one dispatcher at a time."""

PRIMITIVE_REQUESTS_MAX: Final = CALLS_PENDING_MAX
"""Requests of one process for locks, semaphores, queues and events that are not finished: those that
wait, and places that are held."""

QUEUE_ITEM_BYTES_MAX: Final = 2**20
"""Bytes of one item of a shared queue, pickled. Items wait in the memory of the dispatcher, which
passes them on in messages, so larger values belong into files, arguments or results.
"""

QUEUED_BYTES_MAX: Final = 256 * 2**20
"""Bytes of the items of all shared queues of one dispatcher, with 100 bytes for each item."""

TASK_ERRORS_KEPT: Final = 100
"""Errors of tasks that the keeper keeps for tasks that ask later. An older error is only in the
state of the task that has failed."""

# -- time, in seconds ------------------------------------------------------------------------------

LEASE_S: Final = 10.0
"""The length of a lease in seconds. A worker without contact to the dispatcher ends its functions
after at most half of it."""

RECONNECT_GRACE_S: Final = 1.0
"""Seconds after the end of its connection that a worker has to reconnect in the same
incarnation.
"""

FAILURES_KEPT: Final = 100
"""Errors of one round that are kept and reported. Each error takes memory, and time for
unpickling.
"""

CANCEL_GRACE_S: Final = 5.0
"""Seconds that a running function has to end after it was cancelled. After this time its slot
process is killed."""

GRACE_S: Final = 10.0
"""Seconds for which an orderly stop (Ctrl-C, SIGTERM) waits for running work, at most."""

ORPHAN_LIMIT_S: Final = 60.0
"""Seconds after which a worker stops if it finds no dispatcher."""

INVITED_ORPHAN_LIMIT_S: Final = 10.0
"""Seconds without a dispatcher after which a worker stops if a program has recruited it in a task.
This is shorter than ORPHAN_LIMIT_S, because the task continues, and the next program can recruit a
worker in it again.
"""

CONNECT_S: Final = 10.0
"""Seconds for which `connect` waits for a server if the program names no time-out: a start on a
busy host takes less."""

CONNECT_TIMEOUT_S: Final = 180.0
"""Seconds for which a program waits for the tasks of a cluster with parameter servers: as long as
TensorFlow does."""

INVITE_PATIENCE_S: Final = 1.0 + LEASE_S
"""Seconds for which a program repeats its request to a task that serves another program as a
worker. The other program may have crashed a moment ago, and the task is then free soon.
"""

RESTARTS: Final = 3
"""How often a launcher restarts a worker or ps that crashed. This is enough for accidents, and few
enough that a task that can never run is reported soon.
"""

RESTART_PAUSE_S: Final = 0.2
"""Seconds before the first restart. The pause doubles before each further restart, up to
RESTART_PAUSE_S_MAX."""

RESTART_PAUSE_S_MAX: Final = 10.0
"""The longest pause before a restart, in seconds. A host that needs longer to recover needs a
person."""

DESCRIBED_WORKS_MAX: Final = 100_000
"""Work items that a coordinator names for a drain report. This takes a tenth of a second and a
message of a few MB."""

DESCRIBED_S: Final = 1.0
"""Seconds that a coordinator has to name its work for a drain report. Its loop thread replies at
once unless the process is suspended."""

WORKER_IDLE_S: Final = 60.0
"""Seconds without work after which a worker leaves a cluster with `min` and `max`. Most pauses of a
program are shorter."""

RESTARTS_FORGOTTEN_S: Final = 600.0
"""Seconds for which a restarted task must run before its restarts are counted from zero again."""

OVERTAKE_S: Final = 2.0
"""Seconds for which smaller requests for resources may overtake a larger one. Then a worker is kept
free for it, which leaves a part of that worker idle."""

GROWTH_LIMIT_S: Final = 60.0
"""Seconds after the last worker has joined or was lost for which functions wait for a worker with
enough resources. Then no such worker is expected to join."""

CLUSTER_LOST_LIMIT_S: Final = 60.0
"""Seconds without a dispatcher, or without any worker, after which `join` and `fetch` raise
UnavailableError."""

WORKER_RECOVERY_TIMEOUT_S: Final = 3600.0
"""Seconds after which work that is pinned to a missing worker fails. Most launchers have given the
worker up by then."""

LEADER_WAIT_S: Final = 60.0
"""Seconds for which a request about barriers or keys without a time-out of its own waits until the
keeper has started."""

HEARTBEAT_IVL_S: Final = 0.3
"""Seconds between ZeroMQ's own PINGs from the side that connects; libzmq sends them outside the
GIL."""

HEARTBEAT_SERVER_S: Final = 4.0
"""Seconds between two PINGs of the side that accepted the connection, and of a worker to its
dispatcher, which may have thousands of workers. The first cannot leave it to a time-out that the
PINGs of its peer announce (`ZMQ_HEARTBEAT_TTL`): libzmq forgets it at the peer's next message, until
the next PING.
"""

HEARTBEAT_TIMEOUT_S: Final = 2.0
"""Seconds without a reply to a PING after which libzmq closes the connection. No frame may take
longer to transmit."""

WAIT_LOG_S: Final = 10.0
"""Seconds between two log lines of a wait without a deadline. The line names the peer for which the
process waits."""

NVIDIA_SMI_S: Final = 20.0
"""Seconds that nvidia-smi may take to list the GPUs of this host. With a broken driver it hangs."""

POD_LIST_S: Final = 30.0
"""Seconds for one reply of a Kubernetes API server."""

POD_POLL_S: Final = 1.0
"""Seconds between two checks of the pods while a resolver waits for them."""

POD_READY_LOOK_S: Final = 5
"""Seconds between two checks by a node whether a pod's port is bound. The check is cheap, because
it is only one TCP connection."""

POD_ALIVE_LOOK_S: Final = 60
"""Seconds between two checks by a node whether a server replies. Each check starts a Python
interpreter, which takes half a second of a core.
"""

POD_ALIVE_ANSWER_S: Final = 30
"""Seconds that the check whether a server replies may take on a busy node."""

POD_ALIVE_FAILURES: Final = 3
"""Checks in a row without a reply after which Kubernetes restarts the server. One check is not
enough, because a restarted server has lost its data.
"""

POD_GRACE_MARGIN_S: Final = 5
"""Seconds that a pod has in addition to the grace of its role, so that the role can end its child
processes and connections."""

# -- files that people write -----------------------------------------------------------------------

CONFIG_BYTES_MAX: Final = 2**20
"""Bytes of a cluster file. A file with the addresses of 10,000 tasks has 300 kB."""

CONFIG_NODES_MAX: Final = 100_000
"""Values of a cluster file after its aliases are expanded, because a page of aliases to aliases can
expand to billions."""

# -- calls and replies -----------------------------------------------------------------------------

HANDLER_THREADS_MAX: Final = 32
"""Handlers of one RPC server that run at a time, without inline handlers. Further calls wait, at
most CALLS_PENDING_MAX of each peer."""

EAGER_BYTES_MAX: Final = 32 * 2**20
"""Bytes of arguments that a client sends with its calls while earlier calls have no reply. Beyond
this, the server pulls large arrays, and other arguments wait for replies. As much is in flight on a
path to another continent at 2.5 Gbit/s.
"""

CLIENT_UNASKED_BYTES_MAX: Final = 2 * EAGER_BYTES_MAX
"""Bytes of arguments that one client has sent with calls that have not begun. At the bound the next
call gets RESOURCE_EXHAUSTED. This is twice as much as a client sends, because the server still
counts a call for a short time after the client has given it up.
"""

UNCOUNTED_BYTES_MAX: Final = CLIENT_UNASKED_BYTES_MAX // CALLS_PENDING_MAX
"""Bytes of arguments up to which a call counts neither against the client's EAGER_BYTES_MAX nor
against the server's CLIENT_UNASKED_BYTES_MAX. The client sends such a call at once, also while it
holds back other calls. CALLS_PENDING_MAX such calls together stay within the server's bound.
"""

CLIENT_PULLED_BYTES_MAX: Final = 256 * 2**20
"""Bytes of one client's arguments that a server has pulled for calls that have not begun. This is
enough to have a call ready for each thread, and little enough for many clients.
"""

SESSION_THREADS_MAX: Final = 512
"""Functions and accesses of sessions that one task runs at a time. Further ones wait. The bound is
high, because a function may wait for another function.
"""

SESSION_LOST_S: Final = 60.0
"""Seconds that a session has to reconnect after its connection has ended. After this time the task
drops the session, and frees the objects that only the session could refer to.
"""

SESSIONS_MAX: Final = 65_536
"""The largest number of sessions of one task."""

TASK_PROBE_S: Final = 1.0
"""Seconds after which a task that does not reply counts as missing in a list of present tasks."""

STREAM_ITEMS_AHEAD: Final = 512
"""Items that a generator produces before the client requests them, and items that may be in flight.
They are enough for the round trip of small items.
"""

STREAM_BYTES_AHEAD: Final = 4 * 2**20
"""Bytes of the items that a generator produces before the client requests them. One larger item is
allowed if there is no other."""

STREAMS_OF_PEER_MAX: Final = 64
"""Streams of one client at one server. Each stream takes a thread of the server."""

STREAMS_MAX: Final = 512
"""The largest number of streams of all clients at one server."""

SERVER_DESCRIPTORS: Final = 32
"""File descriptors that the server of a task needs: twelve for itself, twelve for its connection to
the leader, and some for other connections. Without free descriptors libzmq ends the process, or
never accepts a connection.
"""

# -- messages and collectives between tasks --------------------------------------------------------

MAIL_ITEMS_MAX: Final = 65_536
"""Messages that a task keeps until they are received. The sender of the next message gets
RESOURCE_EXHAUSTED."""

MAIL_BYTES_MAX: Final = 4 * 2**30
"""Bytes of the messages that a task keeps until they are received. A sender that is too fast must
get an error before memory is full. One larger message is accepted if the task keeps no other.
"""

COLLECTIVE_TIMEOUT_S: Final = 600.0
"""Seconds for which a collective without a time-out of its own waits for the other members, and for
each of their pieces. One member may be minutes behind another, because it still reads its data, for
example. Without a bound a missing member would look like a hang.
"""

COLLECTIVE_INLINE_BYTES_MAX: Final = 65_536
"""Bytes of the largest contribution that a member sends together with its announcement. The leader
then replies with the result, so that the collective takes one round trip.
"""

COLLECTIVE_PIECE_BYTES: Final = 4 * 2**20
"""Bytes of a piece on a ring. With half as many bytes, four processes on two cores would be a
quarter slower, because each piece wakes two threads.
"""

COLLECTIVE_WIDTH: Final = 3
"""Pieces of a ring that a member processes at a time, so that it reduces one piece while another is
on its way."""

# -- checkpoints -----------------------------------------------------------------------------------

CHECKPOINT_SHARDS_AT_ONCE: Final = 4
"""Shards that are read, written or checked at a time, all of them in memory. They are enough to
keep a disk and several parameter servers busy.
"""

CHECKPOINT_POLL_S: Final = 0.5
"""Seconds between two checks for a new checkpoint."""

PS_VERSION_INCARNATION_SHIFT: Final = 40
"""Bits of a variable's version that count its changes. They are enough for 100,000 changes per
second for four months. The bits above them count how often the variable was recovered.
"""

RECOVERY_POLL_S: Final = 0.25
"""Seconds between two checks whether a parameter server has lost its variables. Each check is a
small call."""

# -- the data service: the first eight are tf.data service's defaults ------------------------------

GC_CHECK_S: Final = 600.0
"""Seconds between two checks of a dispatcher for unused readers and iterations. This is long,
because no caller waits for the check."""

GC_TIMEOUT_S: Final = 300.0
"""Seconds after which an iteration without readers is dropped. The restart of a program takes
less.
"""

WORKER_TIMEOUT_S: Final = 600.0
"""Seconds after which a worker that has disconnected is given up. The restart of a host takes
less.
"""

CLIENT_TIMEOUT_S: Final = 300.0
"""Seconds after which a silent reader is dropped."""

DISPATCHER_TIMEOUT_S: Final = 3600.0
"""Seconds for which a data task waits for a dispatcher that does not reply."""

TRAINER_CACHE_BYTES: Final = 10 * 2**30
"""Bytes of elements that each data task keeps for trainers that share them. An element takes memory
only after a trainer has read it."""

SNAPSHOT_CHUNK_BYTES_MAX: Final = 6 * 10**9
"""Bytes of one file of a snapshot. With this bound a snapshot has few files, and can still be read
in parts."""

WORKER_SNAPSHOTS_MAX: Final = 3
"""Streams of snapshots that one worker writes at a time. Each has a pipeline of its own."""

TASK_PROCESSES_PER_CORE: Final = 2
"""Processes of data tasks that a worker runs for each of its cores. Further tasks share these
processes as threads. More processes would compute no faster, and each takes 35 MB and a tenth of a
second of a core.
"""

JOURNAL_LOG_BYTES_MAX: Final = 16 * 2**20
"""Bytes of the journal's write-ahead log on disk. A larger commit makes the log longer only for a
while. SQLite moves the content of the log into the database every 4 MiB.
"""

CONSUMERS_MAX: Final = 65_536
"""Readers that may share a job by `num_consumers`. The dispatcher keeps a state for each of these
readers."""

JOURNAL_RECORDS_MAX: Final = 10_000
"""Records in the journal after which a dispatcher replaces the records by its whole state. A
restarted dispatcher then reads its journal in a fraction of a second.
"""

# -- variables of parameter servers ----------------------------------------------------------------

PS_PATIENCE_S: Final = 10.0
"""Seconds for which a program repeats requests to a silent ps, with the same update ids, as long as
the process of the ps may still exist.
"""

PS_GONE_POLL_S: Final = 1.0
"""Seconds between the questions to the dispatcher whether a lost ps is started again."""

PS_LOSSES_MAX: Final = 8
"""How many connections may be lost during one request to a ps before the request fails. More losses
do not come from the network."""

PS_PROGRAM_GONE_S: Final = 10.0
"""Seconds without a connection after which the program that opened a session counts as gone, so
that the `open` of another program drops the variables of the session. Every reconnect takes less,
and a user waits longer for a restarted program.
"""

PS_CLIENTS_MAX: Final = 16_384
"""Processes whose last updates a ps remembers, so that no update is applied twice. The ps first
forgets those that have been silent longest. Each process takes about 500 bytes.
"""

PS_UPDATE_KEYS_MAX: Final = 65_536
"""Keys of updates that a ps remembers in one session, because another process may repeat the
updates. The ps forgets the oldest keys first.
"""

PS_LOOP_BYTES_MAX: Final = 2**20
"""Bytes that a request for variables reads or writes in the loop of a ps. That takes at most about
half a millisecond; two hand-overs between threads take a quarter of one."""

PS_STEPS_OPEN_MAX: Final = 4
"""Steps of one variable that may wait for gradients at a time. For each step the ps has a sum as
large as the variable. If workers wait for the reply to each step, one step waits, or two if a
worker is ahead.
"""

PS_FUNCTIONS_MAX: Final = 1024
"""Users' update functions that a ps keeps unpickled. It first drops the function that it has kept
the longest. A program sends a dropped function again.
"""

# -- keys of members -------------------------------------------------------------------------------

JOIN_VALID_S: Final = 60.0
"""Seconds in which a join token can be used by default. The start of a process takes less, also on
a busy host."""

JOIN_TOKENS_MAX: Final = 20_000
"""Join tokens that a dispatcher keeps. It also keeps ended tokens, in order to distinguish the
second use of a token from a wrong token."""

JOIN_EXPLAINED_S: Final = 600.0
"""Seconds for which the dispatcher tells a process that its join token has ended. Later it refuses
the key of the process as unknown."""

JOINING_MAX: Final = 1024
"""Connections with unknown keys that a dispatcher accepts at a time, so that the peers can show a
join token. It ends a connection that has not shown a token within HANDSHAKE_S. Strangers can
therefore occupy only this number of file descriptors.
"""

MEMBER_KEYS_MAX: Final = 65_536
"""Keys that a dispatcher keeps, including revoked keys. It never forgets a revoked key, because a
forgotten key could join again."""

REPLACED_KEYS_MAX: Final = 1024
"""Replaced keys that a dispatcher keeps in order to tell their processes why it refuses them. A
replaced key does not count while an open port of its process still shows it. Each restart of a
process that joins replaces a key, and so does each rotation.
"""

KEY_QUESTIONS_MAX: Final = 32_768
"""Keys and addresses about which one process may ask its dispatcher. A larger number is a mistake,
or an attack on memory."""

KEY_RENEWAL_S: Final = 5.0
"""Seconds for which a replaced key keeps its role, so that connections that processes are just
making with the key succeed."""

VOUCHING_S: Final = 2.0
"""Seconds for which a connection with a key of the file `authorized` waits until the dispatcher has
said whether the key was revoked."""

# -- agents of hosts -------------------------------------------------------------------------------

AGENT_BEAT_S: Final = 2.0
"""Seconds between two heartbeats of a launcher to an agent. An agent that gets no order for the
`orphan_limit_s` of the workers ends, but not before AGENT_SILENCE_S_MIN."""

AGENT_SILENCE_S_MIN: Final = 5 * AGENT_BEAT_S
"""The shortest silence limit of an agent, in seconds. With a shorter limit, a pause of the launcher
or of the network would end agents."""

AGENT_HELLO_S: Final = 60.0
"""Seconds that an agent has to send its hello, because ssh may use jump hosts, and Python may be on
a slow file system."""

AGENT_CLOCK_S: Final = 60.0
"""Seconds by which the clock of a host may differ from the launcher's without a warning."""

RAY_REACH_S: Final = 5.0
"""Seconds that a TCP connection to the address of a Ray cluster may take."""

RAY_JOIN_S: Final = 60.0
"""Seconds that joining a Ray cluster may take. Ray itself would wait for minutes for a cluster that
has ended."""

RAY_PLACE_S: Final = 30.0
"""Seconds that Ray has to place an actor. This is less than AGENT_HELLO_S, so that the error says
which resources are missing."""

RAY_LINES_MAX: Final = 1000
"""Lines of an agent that the agent's actor holds until the launcher fetches them. At the bound the
agent waits."""

CODE_BYTES_MAX: Final = 64 * 2**20
"""Bytes of a program's code that a launcher sends to a host. This is ten times a large project. If
the files are larger, they contain data.
"""

CODE_FILE_BYTES_MAX: Final = 4 * 2**20
"""Bytes of one file of a program that a launcher sends to a host. Larger files are left out."""

CODE_FILES_MAX: Final = 20_000
"""The largest number of files of a program that a launcher sends to a host."""

CODE_PART_BYTES: Final = 2**18
"""Bytes of one order with code. An order is so short that a heartbeat can be sent between two
orders on a slow line."""

STREAM_AHEAD: Final = 32
"""Values of a generator that were made and that its reader has not taken yet."""

ACTOR_WINDOW_CALLS: Final = 4096
"""Calls that a program has sent to one actor and that have not ended. More would only wait at the
actor, where a death loses them; the rest waits in the program."""

ACTOR_WINDOW_BYTES: Final = 16 << 20
"""Bytes of the arguments of these calls."""

ACTOR_CALLS_MAX: Final = 4 * ACTOR_WINDOW_CALLS
"""Calls of one connection that wait in an actor. Only a program that does not keep to the window
has more."""

ACTOR_CALL_BYTES_MAX: Final = 4 * ACTOR_WINDOW_BYTES
"""Bytes of the arguments of these calls."""

ACTORS_MAX: Final = 100_000
"""Actors of one dispatcher. A record and its spec take about two kilobytes."""

ACTOR_ENDS_KEPT: Final = 2_000
"""Actors whose end a dispatcher remembers, for programs that ask later. The end of one has the last
lines of its process, or its error."""

WORKER_ACTORS_MAX: Final = 64
"""Actors of one worker if its config has no `actors_max`. Each is a process, and a host that is
meant for 64 of them has room for their memory (about 10 MB each before they do anything)."""

HOSTED_ACTORS_MAX: Final = 10_000
"""The largest `actors_max` of a worker: more processes than a host runs well."""

ACTOR_RESTARTS_MAX: Final = 10**9
"""The largest number of restarts of an actor, which stands for no bound."""

ACTOR_GROUP_MAX: Final = 10_000
"""The largest number of members of a group of actors."""

# -- what is shown of the inside (facts) -----------------------------------------------------------

FACTS_S: Final = 1.0
"""Seconds between two reports of a worker, and of a program, to the dispatcher."""

PROCESS_SAMPLE_S: Final = 2.0
"""Seconds between two readings of the memory and the processor time of a worker's processes. One
reading takes about 30 us for each process."""

OBSERVED_S: Final = 5.0
"""Seconds for which a request for the timeline has workers report each run, so that a watcher that
has died costs nothing."""

FUNCTION_NAME_CHARS_MAX: Final = 100
"""Characters of a function's name in the facts."""

FUNCTIONS_TOLD_APART_MAX: Final = 64
"""Functions that one slot tells apart in its figures, 1.1 kB of shared memory each. Further ones
count together, until a program drops functions."""

FUNCTIONS_SHOWN_MAX: Final = 500
"""Functions by name in the facts. Beyond them the ones that were seen longest ago count together,
as "other functions"."""

FUNCTION_NAMES_KEPT_MAX: Final = 20_000
"""Names of functions, by the number of the program and of the function, that a dispatcher keeps,
because the last figures arrive after the program's end."""

BUCKETS: Final = 128
"""Buckets of a histogram of durations, four for each power of two from BUCKET_MIN_S on: up to two
hours."""

BUCKET_MIN_S: Final = 2e-6
"""The upper bound of the first bucket, in seconds."""

BUCKET_BOUNDS_S: Final = tuple(BUCKET_MIN_S * 2 ** (bucket / 4) for bucket in range(BUCKETS - 1))
"""The largest duration of each bucket but the last, in seconds."""

FAILURES_SHOWN_MAX: Final = 200
"""Failures in the facts, with traceback. The ring takes at most 2 MB."""

SLOT_DEATHS_KEPT: Final = 100
"""Deaths of slot processes in the facts, with their last lines."""

REFUSALS_KEPT: Final = 100
"""Refusals in the facts: of connections, members and messages."""

EVENTS_KEPT: Final = 20_000
"""Runs in the timeline of the facts that no watcher has fetched yet."""

EVENTS_PER_S: Final = 2_000
"""Runs a second of the whole cluster that workers report while a watcher asks for the timeline. Each
gets an equal share, and gives its slots and actors equal shares. The other runs are only counted."""

FAILURES_PER_S: Final = 2.0
FAILURES_AT_ONCE: Final = 8
"""Failures that one process reports with their tracebacks: so many a second, and at once if it has
reported none for long. The others are only counted."""

FAILURE_MESSAGE_CHARS_MAX: Final = 500
"""Characters of the message of an error in the facts."""

TRACEBACK_CHARS_MAX: Final = 8 * 1024
"""Characters of a traceback in the facts; of a longer one the end."""

COORDINATORS_SHOWN_MAX: Final = 1_000
"""Coordinators in the facts. A program has one; each function that schedules functions another."""

ACTORS_SHOWN_MAX: Final = 1_000
"""Actors in the facts."""

SERVERS_KEPT_MAX: Final = 1_000
"""RPC and parameter servers of which a dispatcher keeps the figures."""

METHODS_SHOWN_MAX: Final = 100
"""Methods of one server in the facts, those with the most calls."""

RPC_ROWS_MAX: Final = 1_000
"""Methods of all servers in the facts, the most time first."""

VARIABLES_SHOWN_MAX: Final = 500
"""Variables in the facts, of one parameter server and of all, the largest first."""

WAITING_ROWS_MAX: Final = 100
"""Rows of reasons why work waits, in the facts. Further ones are left out, the smallest first."""
