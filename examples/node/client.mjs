// A client of zmqdist's RPC, written from docs/protocol.md alone: calls, streams, time limits,
// reconnects. It shares no memory.
import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { homedir } from "node:os";
import { Dealer } from "zeromq";
import { Tuple, decode, encode, pack, unpack } from "./codec.mjs";

const VERSION = [2, 0], PIECE_BYTES = 16_384, CHUNK_BYTES = 524_288, WINDOW_BYTES = 2_097_152;
const UNANSWERED_BYTES = 2 ** 25;
const CALL = 1, REPLY = 2, CANCEL = 3, GOODBYE = 5, REFUSED = 6;
const REPLIES = 11, CHUNK = 12, CREDIT = 13;
export const CANCELLED = 1, DEADLINE_EXCEEDED = 4, FAILED_PRECONDITION = 9;
export const UNAVAILABLE = 14, UNAUTHENTICATED = 16;
const REFUSAL = "handshake:error:auth";
const ENDS = ["close", "disconnect", "end", REFUSAL, "handshake:error:other"];
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** The error of a call; `code` is one of the codes of docs/protocol.md. */
export class CallError extends Error {
  constructor(code, message) { super(message); this.code = code; }
}

function userToken() {
  const state = process.env.XDG_STATE_HOME || `${homedir()}/.local/state`;
  return readFileSync(process.env.ZMQDIST_TOKEN_FILE || `${state}/zmqdist/token`, "utf8").trim();
}

export class Client {
  #address; #security; #socket; #server = null; #closed = false; #sent = Promise.resolve();
  #calls = new Map(); #waiting = []; #outgoing = []; #unanswered = 0; #unacknowledged = 0;
  #ids = 0; #streams = 0;

  /** Connect to "host:port", now and after each loss of the connection. `security` has the options
   *  of zeromq.js: by default PLAIN with this user's token. */
  constructor(address, security = { plainUsername: "client", plainPassword: userToken() }) {
    [this.#address, this.#security] = [address, security];
    this.#run();
  }

  /** Call a method, and return its value: `call("scale", [array], { named: { by: 2 } })`. */
  async call(method, args = [], { named, timeoutMs = 0 } = {}) {
    const { body, parts } = await this.#request(method, argumentsOf(args, named), timeoutMs);
    return decode(body, parts);
  }

  /** Yield the items of a generator function of the server. */
  async *stream(method, args = [], { named, timeoutMs = 0 } = {}) {
    const number = ++this.#streams, due = timeoutMs && Date.now() + timeoutMs;
    const first = Tuple.of(number, method, argumentsOf(args, named));
    let reply = await this.#request("zmqdist.open", first, timeoutMs), over = null;
    try {
      for (;;) {
        const [bodies, counts, end] = unpack(reply.body);
        for (const [at, body] of bodies.entries()) {
          yield decode(body, reply.parts.splice(0, counts[at] ?? 0));
        }
        over = end;
        if (over?.[0]) throw new CallError(...over);
        if (over) return;
        const left = due && Math.max(1, due - Date.now());
        reply = await this.#request("zmqdist.next", Tuple.of(number), left);
      }
    } finally { // also when the loop of the caller ends early
      if (!over) this.#request("zmqdist.close", Tuple.of(number), 1000).catch(() => {});
    }
  }

  close() {
    [this.#closed, this.#server] = [true, null];
    this.#fail(CANCELLED, "the client was closed");
    this.#socket.close();
  }

  #request(method, value, timeoutMs) {
    if (this.#closed) throw new CallError(FAILED_PRECONDITION, "the client is closed");
    const id = ++this.#ids, [body, parts] = encode(value);
    const due = timeoutMs && Date.now() + timeoutMs;
    return new Promise((resolve, reject) => {
      const timer = timeoutMs && setTimeout(() => {
        if (this.#calls.get(id).isSent) this.#post([CANCEL, id]);
        this.#end(id, new CallError(DEADLINE_EXCEEDED, `no reply of ${method} in ${timeoutMs} ms`));
      }, timeoutMs);
      const nbytes = parts.reduce((sum, part) => sum + part.length, 0);
      const call = { method, body, parts, nbytes, due, timer, resolve, reject, isSent: false };
      this.#calls.set(id, call);
      this.#waiting.push(id);
      this.#beginCalls();
    });
  }

  #beginCalls() {
    while (this.#server !== null && this.#waiting.length) {
      const [id] = this.#waiting, call = this.#calls.get(id); // undefined if it has ended
      const bytes = this.#unanswered + (call?.nbytes ?? 0);
      if (call?.nbytes && this.#unanswered && bytes > UNANSWERED_BYTES) return;
      this.#waiting.shift();
      this.#unanswered = bytes;
      if (call) this.#begin(id, call);
    }
  }

  #begin(id, call) {
    call.isSent = true;
    const inChunks = call.nbytes > CHUNK_BYTES;
    const sizes = inChunks ? call.parts.map((part) => [part.length]) : [];
    const left = call.due && Math.max(1, call.due - Date.now());
    const header = [CALL, id, call.method, this.#server, left, call.body, sizes];
    this.#post(header, inChunks ? [] : call.parts);
    for (const [part, bytes] of inChunks ? call.parts.entries() : []) {
      for (let at = 0; at < bytes.length; at += CHUNK_BYTES) {
        this.#outgoing.push([id, part, at, bytes.subarray(at, at + CHUNK_BYTES)]);
      }
    }
    this.#sendChunks();
  }

  #sendChunks() {
    while (this.#outgoing.length && this.#unacknowledged + CHUNK_BYTES <= WINDOW_BYTES) {
      const [id, part, at, bytes] = this.#outgoing.shift();
      if (!this.#calls.has(id)) continue;
      this.#unacknowledged += bytes.length;
      this.#post([CHUNK, id, part, at], [bytes]);
    }
  }

  #post(message, frames = []) {
    const header = pack(message), pieces = [];
    for (let at = 0; at < header.length; at += PIECE_BYTES) {
      pieces.push(header.slice(at, at + PIECE_BYTES));
    }
    const after = pieces.length - 1;
    if (after) pieces[0] = Buffer.concat([Buffer.from([0xc1, after >> 8, after & 255]), pieces[0]]);
    this.#send([...pieces, ...frames]);
  }

  #send(frames) { // zeromq.js sends one message at a time
    const socket = this.#socket;
    this.#sent = this.#sent.then(() => socket.send(frames)).catch(() => {});
  }

  async #run() {
    for (; !this.#closed; await sleep(100)) {
      const socket = this.#socket = new Dealer({ ...this.#security, linger: 0,
        reconnectInterval: -1, sendHighWaterMark: 0, receiveHighWaterMark: 0,
        heartbeatInterval: 300, heartbeatTimeToLive: 2000, heartbeatTimeout: 2000 });
      const ended = new Promise((end) => ENDS.forEach((name) => socket.events.on(name, end)));
      socket.connect(`tcp://${this.#address}`);
      const incarnation = (randomBytes(8).readBigUInt64BE() >> 1n) | 1n;
      const fields = pack(["client", incarnation, `node:${process.pid}`]);
      this.#send([Buffer.concat([Buffer.from("ZMQD"), Buffer.from(VERSION), fields])]);
      this.#read(socket).catch(() => {}).finally(() => socket.close());
      const isRefused = (await ended).type === REFUSAL;
      socket.close();
      [this.#server, this.#outgoing, this.#unacknowledged, this.#unanswered] = [null, [], 0, 0];
      if (isRefused) this.#fail(UNAUTHENTICATED, `${this.#address} refused the secret`);
      this.#fail(UNAVAILABLE, `the connection to ${this.#address} ended`, (call) => call.isSent);
    }
  }

  async #read(socket) {
    for await (const [first, ...frames] of socket) {
      if (first.toString("latin1", 0, 4) === "ZMQD") this.#welcome(first);
      else if (first[0] === 0xc1) {
        const pieces = frames.splice(0, first.readUInt16BE(1));
        this.#handle(unpack(Buffer.concat([first.subarray(3), ...pieces])), frames);
      } else this.#handle(unpack(first), frames);
    }
  }

  #welcome(hello) {
    const theirs = [...hello.subarray(4, 6)];
    if (theirs[0] !== VERSION[0]) {
      this.#fail(FAILED_PRECONDITION, `the server has protocol ${theirs}, and this is ${VERSION}`);
      return this.close();
    }
    this.#server = unpack(hello.subarray(6))[1];
    this.#beginCalls();
  }

  #handle([tag, ...fields], frames) {
    if (tag === REPLY) this.#replied(fields, frames);
    if (tag === REPLIES) for (const [, ...reply] of fields[0]) this.#replied(reply, []);
    if (tag === CHUNK) this.#arrived(fields, frames[0]);
    if (tag === CREDIT) {
      this.#unacknowledged -= fields[0];
      this.#sendChunks();
    }
    if (tag === REFUSED) this.#fail(fields[0], fields[1]);
    if (tag === GOODBYE) this.#socket.close();
  }

  #replied([id, code, message, body, announced], frames) {
    if (code) return this.#end(id, new CallError(code, message));
    const parts = announced.length ? announced.map(([nbytes]) => new Uint8Array(nbytes)) : frames;
    const left = announced.reduce((sum, [nbytes]) => sum + nbytes, 0), call = this.#calls.get(id);
    if (call) call.reply = { body, parts, left };
    if (!left) this.#end(id);
  }

  #arrived([id, part, offset], bytes) {
    this.#post([CREDIT, bytes.length]);
    const reply = this.#calls.get(id)?.reply;
    reply?.parts[part].set(bytes, offset);
    if (reply && (reply.left -= bytes.length) === 0) this.#end(id);
  }

  #end(id, error) {
    const call = this.#calls.get(id);
    this.#calls.delete(id);
    if (!call) return;
    clearTimeout(call.timer);
    error ? call.reject(error) : call.resolve(call.reply);
    if (call.isSent && this.#server !== null) this.#unanswered -= call.nbytes;
    this.#beginCalls();
  }

  #fail(code, message, ends = () => true) {
    const ended = [...this.#calls].filter(([, call]) => ends(call));
    for (const [id] of ended) this.#end(id, new CallError(code, message));
  }
}

const argumentsOf = (args, named) => named ? { ...named, "": Tuple.from(args) } : Tuple.from(args);
