// node node_checks.mjs FOLDER CHECK [ARGUMENT]: a check of the client in FOLDER; test_node.py runs
// the servers.
import assert from "node:assert/strict";

const [folder, check, argument] = process.argv.slice(2);
const { Client } = await import(`${folder}/client.mjs`);
const { Tensor, Tuple, decode, encode } = await import(`${folder}/codec.mjs`);
const failure = async (promise) => promise.then(() => assert.fail("no error"), (error) => error);

const CHECKS = {
  // argument: JSON list of bodies in hex
  codec() {
    for (const digits of JSON.parse(argument)) {
      const [body, parts] = encode(decode(Buffer.from(digits, "hex")));
      assert.equal(Buffer.from(body).toString("hex"), digits);
      assert.equal(parts.length, 0);
    }
  },
  async values(client) {
    const value = { a: [1, -1, 2.5, null, true], 10: "é", 2: new Uint8Array([0, 255]), none: {} };
    assert.deepEqual(await client.call("echo", [value]), value);
    const numbers = [2n ** 53n, -(2n ** 63n), 2n ** 64n - 1n, 2n ** 64n, -(2n ** 80n) - 1n];
    assert.deepEqual(await client.call("echo", [numbers]), numbers);
    assert.deepEqual(await client.call("echo", [Tuple.of(1, "a")]), Tuple.of(1, "a"));
    assert.deepEqual(await client.call("echo", [new Map([[1, 2]])]), new Map([[1, 2]]));
    assert.equal(await client.call("kind", [2n ** 60n]), "int");
    assert.equal(await client.call("add", [2], { named: { y: 3 } }), 5);
    const texts = ["é".repeat(300_000), "y".repeat(20_000)];
    assert.deepEqual(await client.call("echo", [texts]), texts);
  },
  async arrays(client) {
    const types = [Int8Array, Int16Array, Uint16Array, Int32Array, Uint32Array, Float32Array];
    for (const Type of [...types, Float64Array]) {
      const { shape, data } = await client.call("echo", [Type.of(1, 2, 3)]);
      assert.deepEqual([shape, data], [[3], Type.of(1, 2, 3)]);
    }
    assert.equal(await client.call("kind", [BigInt64Array.of(1n)]), "int64 (1,)");
    const matrix = new Tensor("|u1", [2, 3], Uint8Array.of(0, 3, 1, 4, 2, 5), true);
    assert.equal(await client.call("text", [matrix]), "[[0, 1, 2], [3, 4, 5]]");
    const scalar = new Tensor("<f8", [], Float64Array.of(2));
    assert.equal(await client.call("kind", [scalar]), "float64 ()");
    const parts = { 10: new Uint8Array(70_000).fill(1), 2: new Uint8Array(66_000).fill(2) };
    assert.deepEqual(await client.call("echo", [parts]), parts);
    const large = Float64Array.from({ length: 8 * 2 ** 20 }, (_, at) => at);
    assert.deepEqual((await client.call("echo", [large])).data, large);
    const both = [large, large.map((x) => -x)].map((array) => client.call("echo", [array]));
    assert.deepEqual((await Promise.all(both)).map(({ data }) => data[5]), [5, -5]);
  },
  async errors(client) {
    const error = await failure(client.call("find", ["Ada"]));
    assert.deepEqual([error.code, error.message], [5, "nobody is called Ada"]);
    assert.equal((await failure(client.call("no such method"))).code, 3);
    assert.equal((await failure(client.call("echo", [Symbol("x")]))).name, "TypeError");
  },
  async streams(client) {
    const numbers = [];
    for await (const item of client.stream("count", [3000])) numbers.push(item);
    assert.deepEqual(numbers, [...Array(3000).keys()]);
    let items = 0;
    for await (const { data } of client.stream("count", [20], { named: { size: 20_000 } })) {
      assert.equal(Number(data[19_999]), items++);
    }
    assert.equal(items, 20);
    for await (const item of client.stream("count", [1e9])) if (item === 5) break;
    const drain = async (stream) => { for await (const _ of stream); };
    assert.equal((await failure(drain(client.stream("count", [-7])))).code, 3);
    const endless = client.stream("count", [1e9], { timeoutMs: 300 });
    assert.equal((await failure(drain(endless))).code, 4);
  },
  async deadline(client) {
    const error = await failure(client.call("sleep", [0.5], { timeoutMs: 50 }));
    assert.deepEqual([error.code, error.message], [4, "no reply of sleep in 50 ms"]);
    assert.equal(await client.call("echo", [1], { timeoutMs: 30_000 }), 1);
  },
  // the test ends the server after "called", and starts another after "lost"
  async reconnect(client) {
    assert.equal(await client.call("echo", [1]), 1);
    const running = client.call("wait");
    console.log("called");
    const lost = await failure(running);
    assert.equal(lost.code, 14);
    const waiting = client.call("echo", [2]);
    console.log("lost");
    assert.equal(await waiting, 2);
    console.log("again");
  },
  async token(client) {
    const secret = { plainUsername: "client", plainPassword: "x".repeat(40) };
    const stranger = new Client(argument, secret);
    assert.equal((await failure(stranger.call("echo", [1]))).code, 16);
    stranger.close();
    assert.equal((await failure(stranger.call("echo", [1]))).code, 9);
    assert.equal(await client.call("echo", [1]), 1);
  },
};

if (check === "codec") CHECKS.codec();
else {
  const client = new Client(argument);
  await CHECKS[check](client);
  client.close();
}
