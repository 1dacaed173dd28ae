// node example.mjs HOST:PORT: calls the methods of examples/node/server.py.
import { Client } from "./client.mjs";

const client = new Client(process.argv[2]);
const scaled = await client.call("scale", [Float32Array.of(1, 2, 3)], { named: { by: 2 } });
console.log(scaled.dtype, scaled.shape, scaled.data);

console.log(await client.call("next_number", [2n ** 60n]));

for await (const item of client.stream("count", [3])) console.log(item);

try {
  await client.call("find", ["Ada"], { timeoutMs: 1000 });
} catch (error) {
  console.log(error.code, error.message);
}
client.close();
