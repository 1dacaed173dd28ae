// The safe codec (docs/protocol.md): values to [body, parts] and back.
import { Decoder, Encoder } from "@msgpack/msgpack";

const encoder = new Encoder({ useBigInt64: true });
// The mark keeps keys such as "10" in their order, which is that of the parts.
const decoder = new Decoder({ useBigInt64: true, mapKeyConverter: (key) => `.${key}` });
export const pack = (node) => encoder.encode(node);
export const unpack = (bytes) => decoder.decode(bytes);

/** A tuple of Python; any other Array is a list. */
export class Tuple extends Array {}

/** An array of NumPy. `data` is a typed array; of dtypes that JavaScript lacks, their bytes. */
export class Tensor {
  constructor(dtype, shape, data, fortran = false) {
    Object.assign(this, { dtype, shape, data, fortran });
  }
}

const TYPES = {
  "|b1": Uint8Array, "|u1": Uint8Array, "|i1": Int8Array, "<u2": Uint16Array, "<i2": Int16Array,
  "<u4": Uint32Array, "<i4": Int32Array, "<u8": BigUint64Array, "<i8": BigInt64Array,
  "<f4": Float32Array, "<f8": Float64Array,
};
const [TUPLE, LIST, DICT, NAMED, ARRAY, SCALAR, COMPLEX, BIG, TEXT, BYTES, SPEC, FROZEN] =
  Array(12).keys();
const INLINE_BYTES_MAX = 65_536;
const raw = (data) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
const typed = (dtype, bytes) =>
  dtype in TYPES ? new TYPES[dtype](new Uint8Array(bytes).buffer) : bytes;

/** Return [body, parts]. Numbers without a fraction are ints, Uint8Arrays bytes, Maps dicts. */
export function encode(value) {
  const parts = [];
  const place = (bytes) => (bytes.length > INLINE_BYTES_MAX ? (parts.push(bytes), null) : bytes);
  const node = (item) => {
    if (item === null || typeof item === "boolean" || typeof item === "number") return item;
    if (typeof item === "bigint") return int(item);
    if (typeof item === "string" && item.length <= INLINE_BYTES_MAX / 3) return item;
    if (typeof item === "string") return [TEXT, place(new TextEncoder().encode(item))];
    if (item instanceof Uint8Array) {
      return item.length > INLINE_BYTES_MAX ? [BYTES, place(item)] : item;
    }
    if (ArrayBuffer.isView(item)) {
      const dtype = Object.keys(TYPES).find((name) => TYPES[name] === item.constructor);
      if (dtype) return [ARRAY, dtype, [item.length], false, place(raw(item))];
    }
    if (item instanceof Tensor) {
      return [ARRAY, item.dtype, item.shape, item.fortran, place(raw(item.data))];
    }
    if (Array.isArray(item)) return [item instanceof Tuple ? TUPLE : LIST, ...item.map(node)];
    if (item instanceof Map) return [DICT, ...[...item].flatMap((pair) => pair.map(node))];
    if (Object.getPrototypeOf(item ?? 0) !== Object.prototype) {
      throw new TypeError(`no value of the codec: ${typeof item}`);
    }
    return Object.fromEntries(Object.entries(item).map(([key, entry]) => [key, node(entry)]));
  };
  return [pack(node(value)), parts];
}

function int(value) {
  if (value >= -(2n ** 63n) && value < 2n ** 64n) return value;
  const bytes = [];
  for (; value !== 0n && value !== -1n; value >>= 8n) bytes.push(Number(value & 255n));
  const last = bytes.at(-1) >= 128;
  if (last !== (value < 0n)) bytes.push(Number(value & 255n));
  return [BIG, Uint8Array.from(bytes)];
}

/** Return the value of a body. Ints beyond 2**53 are BigInts. */
export function decode(body, parts = []) {
  const frames = [...parts];
  const joined = parts.at(-1);
  let used = 0;
  const bytesOf = (data) => {
    if (data === null) return raw(frames.shift());
    return typeof data === "number" ? raw(joined.subarray(used, (used += data))) : raw(data);
  };
  const value = (node) => {
    if (typeof node === "bigint") {
      return Number.isSafeInteger(Number(node)) ? Number(node) : node;
    }
    if (node === null || typeof node !== "object") return node;
    if (node instanceof Uint8Array) return raw(node);
    if (!Array.isArray(node)) {
      const items = Object.entries(node).map(([key, item]) => [key.slice(1), value(item)]);
      return Object.fromEntries(items);
    }
    const [tag, ...rest] = node;
    switch (tag) {
      case TUPLE: return Tuple.from(rest, value);
      case LIST: return rest.map(value);
      case DICT: {
        const items = rest.map(value);
        const pairs = items.flatMap((key, at) => (at % 2 ? [] : [[key, items[at + 1]]]));
        const isText = pairs.every(([key]) => typeof key === "string");
        return isText ? Object.fromEntries(pairs) : new Map(pairs);
      }
      case NAMED: return Object.fromEntries(rest[1].map((name, at) => [name, value(rest[at + 2])]));
      case ARRAY: return new Tensor(rest[0], rest[1], typed(rest[0], bytesOf(rest[3])), rest[2]);
      case SCALAR: {
        if (rest[0] === "U") return new TextDecoder().decode(rest[1]);
        return rest[0] === "S" ? raw(rest[1]) : typed(rest[0], rest[1])[0];
      }
      case COMPLEX: return { real: rest[0], imag: rest[1] };
      case BIG: {
        const sign = rest[0].at(-1) > 127 ? -1n : 0n;
        return rest[0].reduceRight((sum, byte) => (sum << 8n) | BigInt(byte), sign);
      }
      case TEXT: return new TextDecoder().decode(bytesOf(rest[0]));
      case BYTES: return bytesOf(rest[0]);
      case SPEC: return { shape: rest[0], dtype: rest[1], name: rest[2] };
      case FROZEN: return value(rest[0]);
      default: throw new TypeError(`no tag of the codec: ${tag}`);
    }
  };
  return value(unpack(body));
}
