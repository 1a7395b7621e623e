import { deep } from "./deep";
export default {
  async fetch(request: Request): Promise<any> {
    switch (new URL(request.url).pathname) {
      case "/throw": deep();
      case "/wrong": return "text";
      case "/never": return new Promise(() => {});
      case "/loop": for (;;);
      case "/memory": { const held = []; for (;;) held.push(new Uint8Array(16e6).fill(1)); }
      case "/flood": for (let i = 0; i < 3_000; i++) console.log("flood ".repeat(20));
    }
    return new Response("well");
  },
};
